"""mask_mod and score_mod functions become the text of expressions, or a refusal that says what to write instead."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tilewise import _trace, masks, ops

SCALE = 0.25


def score(function, **captured):
    return str(tilewise.score_mod(function, **captured))


def visible(function, **captured):
    return masks.mod(function, **captured).resolve().text


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x, b, h, i, j, s: x, "x"),
        (lambda x, b, h, i, j, s: x + 0.1 * (j - i), "add(x,mul(0.1,sub(j,i)))"),
        (lambda x, b, h, i, j, s: 1 - x, "sub(1,x)"),
        (lambda x, b, h, i, j, s: x / 2, "div(x,2)"),
        (lambda x, b, h, i, j, s: 1 / x, "div(1,x)"),
        (lambda x, b, h, i, j, s: x * (i // 3) + j % 4, "add(mul(x,floordiv(i,3)),mod(j,4))"),
        (lambda x, b, h, i, j, s: -x + abs(i - j), "add(neg(x),abs(sub(i,j)))"),
        (lambda x, b, h, i, j, s: +x, "x"),
        (lambda x, b, h, i, j, s: x**2, "mul(x,x)"),
        (lambda x, b, h, i, j, s: x**0.5, "sqrt(x)"),
        (lambda x, b, h, i, j, s: 7 // j + 7 % j, "add(floordiv(7,j),mod(7,j))"),
        (lambda x, b, h, i, j, s: ops.where(i > j, x, -math.inf), "where(gt(i,j),x,-inf)"),
        (lambda x, b, h, i, j, s: ops.minimum(x, 1.0) + ops.maximum(0, x), "add(min(x,1.0),max(0,x))"),
        (lambda x, b, h, i, j, s: ops.exp(ops.log(ops.tanh(ops.sqrt(x)))), "exp(log(tanh(sqrt(x))))"),
        (lambda x, b, h, i, j, s: x + ops.to_float(i >= j), "add(x,float(ge(i,j)))"),
        (lambda x, b, h, i, j, s: ops.abs(x), "abs(x)"),
        (
            lambda x, b, h, i, j, s: x + s.seqlen_q + s.seqlen_kv + s.q_offset + s.head_kv,
            "add(add(add(add(x,seqlen_q),seqlen_kv),q_offset),head_kv)",
        ),
        (lambda x, b, h, i, j, s: x + 1e-5 + 1e20 + 1.0 + 1e16, "add(add(add(add(x,1e-05),1e+20),1.0),1e+16)"),
        (lambda x, b, h, i, j, s: x + -3 + -0.5, "add(add(x,-3),-0.5)"),
        (lambda x, b, h, i, j, s: x * SCALE, "mul(x,0.25)"),
        (lambda x, b, h, i, j, s: 0.0, "0.0"),
        (lambda x, b, h, i, j, s: x * np.float32(0.5), "mul(x,0.5)"),
        (lambda x, b, h, i, j, s: np.float32(0.5) * x, "mul(0.5,x)"),
        (lambda x, b, h, i, j, s: np.int64(3) - i, "sub(3,i)"),
        (lambda x, b, h, i, j, s: np.exp(x) + np.where(i > j, 1.0, 2.0), "add(exp(x),where(gt(i,j),1.0,2.0))"),
        (lambda x, b, h, i, j, s: np.minimum(x, i), "min(x,i)"),
    ],
)
def test_score_text(function, text):
    assert score(function) == text


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda b, h, i, j, s: i >= j, "mod(ge(i,j))"),
        (lambda b, h, i, j, s: (i < j) & (h == 0) | ~(b != 1), "mod(or(and(lt(i,j),eq(h,0)),not(ne(b,1))))"),
        (lambda b, h, i, j, s: (i < j) ^ (j > 3), "mod(ne(lt(i,j),gt(j,3)))"),
        (lambda b, h, i, j, s: True, "mod(true)"),
        (lambda b, h, i, j, s: True & (i <= j), "mod(and(true,le(i,j)))"),
        (lambda b, h, i, j, s: 3 > i, "mod(lt(i,3))"),
        (lambda b, h, i, j, s: np.logical_and(i > 1, j > 1), "mod(and(gt(i,1),gt(j,1)))"),
    ],
)
def test_mask_text(function, text):
    assert visible(function) == text


def test_torch_functions_are_understood():
    torch = pytest.importorskip("torch")
    assert score(lambda x, b, h, i, j, s: torch.where(i >= j, torch.tanh(x), -1.0)) == "where(ge(i,j),tanh(x),-1.0)"
    assert score(lambda x, b, h, i, j, s: torch.abs(x) + torch.tensor(2.0)) == "add(abs(x),2.0)"
    with pytest.raises(tilewise.TraceError, match="softmax"):
        score(lambda x, b, h, i, j, s: torch.softmax(x, 0))


def test_captured_objects_become_references():
    table = np.zeros((4, 9), np.float32)
    ids = np.zeros(9, np.int32)
    keep = np.zeros(9, bool)
    text = score(lambda x, b, h, i, j, s: x * s.alpha + s.table[h, i - j + s.n] + s.alpha, table=table, alpha=0.5, n=4)
    assert text == "add(add(mul(x,$0),gather(@0,h,add(sub(i,j),$1i))),$0)"
    assert visible(lambda b, h, i, j, s: (s.ids[i] == s.ids[j]) & s.keep[j], ids=ids, keep=keep) == (
        "mod(and(eq(gather(@0,i),gather(@0,j)),gather(@1,j)))"
    )
    # what is captured but not read is left out
    unused = tilewise.score_mod(lambda x, b, h, i, j, s: x + s.used[i], unused=table, used=ids)
    assert [name for name, _ in unused.arrays] == ["used"]
    assert score(lambda x, b, h, i, j, s: x + ops.where(s.on, 1, 0), on=True) == "add(x,where(ne($0i,0),1,0))"


def test_a_captured_array_without_axes_is_read_as_one_element():
    torch = pytest.importorskip("torch")
    alpha = torch.tensor(2.0, requires_grad=True)
    mod = tilewise.score_mod(lambda x, b, h, i, j, s: x * s.alpha, alpha=alpha)
    assert str(mod) == "mul(x,gather(@0,0))"
    assert mod.arrays[0][1].requires_grad


def test_arrays_and_scalars_are_numbered_over_mask_and_score_mod():
    ids, table = np.zeros(3, np.int32), np.zeros(3, np.float32)
    mask = masks.documents(ids) & masks.mod(lambda b, h, i, j, s: j < s.n, n=2)
    mod = tilewise.score_mod(lambda x, b, h, i, j, s: x * s.alpha + s.table[j], alpha=1.5, table=table)
    q = np.zeros((1, 3, 1, 4), np.float32)
    call = tilewise._problem.Call(q, q, q, mask=mask, score_mod=mod)
    assert call.settings.mask == "and(documents(@0,@0),mod(lt(j,$0i)))"
    assert call.settings.score_mod == "add(mul(x,$1),gather(@1,j))"
    assert call.settings.scalars == (2.0, 1.5)
    assert call.arrays[-2] is ids and call.arrays[-1] is table


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (lambda x, b, h, i, j, s: x if i > j else 0.0, "where"),
        (lambda x, b, h, i, j, s: x * (i > j and j > 0), "&"),
        (lambda x, b, h, i, j, s: x * (not i > j), "~"),
        (lambda x, b, h, i, j, s: x * (0 < i < j), r"\(a < b\) & \(b < c\)"),
        (lambda x, b, h, i, j, s: min(x, 1.0), "minimum"),
        (lambda x, b, h, i, j, s: float(i) * x, "to_float"),
        (lambda x, b, h, i, j, s: int(x), "//"),
        (lambda x, b, h, i, j, s: sum(i), "iterated"),
        (lambda x, b, h, i, j, s: x[0], "indexed"),
        (lambda x, b, h, i, j, s: [1.0, 2.0][i], "capture it by keyword"),
        (lambda x, b, h, i, j, s: x + np.zeros(4)[i], "capture it by keyword"),
        (lambda x, b, h, i, j, s: x + np.zeros((4, 4))[i, j], "capture it by keyword"),
        (lambda x, b, h, i, j, s: x + np.zeros(4), "capture it by keyword"),
        (lambda x, b, h, i, j, s: np.zeros(4) + x, "capture it by keyword"),
        (lambda x, b, h, i, j, s: x * math.nan, "NaN"),
        (lambda x, b, h, i, j, s: x + 2**40, "int32"),
        (lambda x, b, h, i, j, s: x & i, "bool"),
        (lambda x, b, h, i, j, s: i & 1, "// and %"),
        (lambda x, b, h, i, j, s: x**i, "exp"),
        (lambda x, b, h, i, j, s: x**7, "exponent"),
        (lambda x, b, h, i, j, s: 2**x, "exp"),
        (lambda x, b, h, i, j, s: ops.where(i, x, 0), "c != 0"),
        (lambda x, b, h, i, j, s: x + s.missing, "missing"),
        (lambda x, b, h, i, j, s: "x", "str"),
        (lambda x, b, h, i, j, s: None, "return"),
        (lambda x, b, h, i, j, s: np.sin(x), "sin"),
        (lambda x, b, h, i, j, s: np.add.reduce(x), "reduce"),
    ],
)
def test_what_an_expression_cannot_say(function, hint):
    with pytest.raises(tilewise.TraceError, match=hint):
        tilewise.score_mod(function)


def test_raw_tensors_in_the_function_are_refused():
    torch = pytest.importorskip("torch")
    table = torch.zeros(4, requires_grad=True)
    for function in (
        lambda x, b, h, i, j, s: x + table[i],
        lambda x, b, h, i, j, s: x + table,
        lambda x, b, h, i, j, s: table * x,
    ):
        with pytest.raises(tilewise.TraceError, match="capture it by keyword"):
            tilewise.score_mod(function)


@pytest.mark.parametrize(
    ("index", "hint"),
    [
        (lambda s, x, i, j: s.table[i], "2"),
        (lambda s, x, i, j: s.table[i, j, 0], "3 indices"),
        (lambda s, x, i, j: s.table[i, x], "real index"),
        (lambda s, x, i, j: s.table[i, i / 2], "//"),
        (lambda s, x, i, j: s.table[i, :], "slices"),
        (lambda s, x, i, j: s.table + x, "index it"),
        (lambda s, x, i, j: x + s.table, "index it"),
        (lambda s, x, i, j: s.table.mean(), "can only be indexed"),
    ],
)
def test_wrong_use_of_a_captured_array(index, hint):
    with pytest.raises(tilewise.TraceError, match=hint):
        tilewise.score_mod(lambda x, b, h, i, j, s: index(s, x, i, j), table=np.zeros((3, 3), np.float32))


def test_arity_is_checked():
    with pytest.raises(tilewise.TraceError, match=r"function of \(b, h, i, j\).*\(b, h, i, j, s\)"):
        masks.mod(lambda b, h, i, j: i > j)
    with pytest.raises(tilewise.TraceError, match=r"x, b, h, i, j, s"):
        tilewise.score_mod(lambda x, i, j: x)
    with pytest.raises(tilewise.ArgumentTypeError, match="a str"):
        tilewise.score_mod("x")
    assert score(lambda *args: args[0]) == "x"
    with pytest.raises(tilewise.TraceError, match="bool"):
        masks.mod(lambda b, h, i, j, s: i - j)


def test_captured_objects_are_checked():
    with pytest.raises(tilewise.InvalidArgumentError, match="seqlen_q"):
        tilewise.score_mod(lambda x, b, h, i, j, s: x, seqlen_q=3)
    with pytest.raises(tilewise.InvalidArgumentError, match="int32"):
        tilewise.score_mod(lambda x, b, h, i, j, s: x + s.n, n=2**40)
    with pytest.raises(tilewise.ArgumentTypeError, match="captured f"):
        tilewise.score_mod(lambda x, b, h, i, j, s: x, f=lambda: 0)
    assert tilewise.score_mod(lambda x, b, h, i, j, s: x + s.t[i], t=[1.0, 2.0]).arrays[0][1].tolist() == [1.0, 2.0]


def test_text_that_explodes_is_refused():
    def twice(x, b, h, i, j, s):
        for _ in range(40):
            x = x + x
        return x

    with pytest.raises(tilewise.TraceError, match="bytes of text"):
        tilewise.score_mod(twice)


def test_a_long_chain_is_rendered_without_recursion():
    def chain(x, b, h, i, j, s):
        for _ in range(2000):
            x = x + 1
        return x

    assert score(chain).count("add(") == 2000  # the C++ side refuses it by its depth, with a reason


def test_the_cache_serves_equal_functions_only():
    _trace._cache.clear()

    def make(weight):
        return lambda x, b, h, i, j, s: x * weight

    assert score(make(0.5)) == "mul(x,0.5)"
    assert len(_trace._cache) == 1
    assert score(make(0.5)) == "mul(x,0.5)"
    assert len(_trace._cache) == 1
    assert score(make(0.25)) == "mul(x,0.25)"
    assert score(make(0.0)) == "mul(x,0.0)"
    assert score(make(-0.0)) == "mul(x,-0.0)"
    assert score(make(1)) == "mul(x,1)"
    assert score(make(1.0)) == "mul(x,1.0)"
    assert score(make(True)) == "mul(x,true)"


def test_the_cache_sees_globals_and_is_not_fooled_by_objects():
    global SCALE
    function = lambda x, b, h, i, j, s: x * SCALE  # noqa: E731
    assert score(function) == "mul(x,0.25)"
    try:
        SCALE = 4.0
        assert score(function) == "mul(x,4.0)"
    finally:
        SCALE = 0.25

    class Config:
        weight = 1.0

    config = Config()
    function = lambda x, b, h, i, j, s: x * config.weight  # noqa: E731
    assert score(function) == "mul(x,1.0)"
    config.weight = 2.0
    assert score(function) == "mul(x,2.0)"


def test_functions_with_state_are_traced_anew():
    _trace._cache.clear()
    assert score(lambda x, b, h, i, j, s: x * np.random.default_rng().random()) != ""
    assert score(lambda x, b, h, i, j, s: x * eval("0.5")) == "mul(x,0.5)"
    assert score(lambda x, b, h, i, j, s: x * sum(n for n in (1, 2))) == "mul(x,3)"
    assert len(_trace._cache) == 0
    assert score(lambda x, b, h, i, j, s: np.exp(x) * math.cos(0.0) + s.a * np.pi, a=1.0).startswith(
        "add(mul(exp(x),1.0)"
    )
    assert len(_trace._cache) == 1


def test_the_cache_tells_captured_kinds_apart():
    function = lambda x, b, h, i, j, s: x + s.a  # noqa: E731
    assert score(function, a=1.0) == "add(x,$0)"
    assert score(function, a=1) == "add(x,$0i)"
    assert score(function, a=2.5) == "add(x,$0)"
    first = tilewise.score_mod(function, a=1.0)
    second = tilewise.score_mod(function, a=2.0)
    assert first.scalars == (1.0,) and second.scalars == (2.0,)
    assert first.expression is second.expression


def test_the_cache_is_bounded():
    for n in range(2 * _trace._CACHE_SIZE):
        tilewise.score_mod((lambda w: lambda x, b, h, i, j, s: x * w)(n))
    assert len(_trace._cache) <= _trace._CACHE_SIZE


# Random expressions: the trace, run by the library, equals the same function on NumPy numbers.

_leaves = st.sampled_from(["b", "h", "i", "j", "s.seqlen_q", "s.seqlen_kv", "s.q_offset", "s.head_kv"])
_integers = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.sampled_from(["2", "3", "-5"])).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        inner.map(lambda t: f"abs({t} - 3)"),
        inner.map(lambda t: f"(5 - {t})"),
    ),
    max_leaves=5,
)
_conditions = st.recursive(
    st.tuples(_integers, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), _integers).map(
        lambda t: f"({t[0]} {t[1]} {t[2]})"
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["&", "|", "^"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda t: f"(~{t})"),
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(_conditions, _integers)
def test_random_functions_mean_what_python_says(condition, amount):
    import formula

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, rows, heads, 4)) for rows, heads in ((5, 4), (7, 2), (7, 2)))
    keep = eval(f"lambda b, h, i, j, s: {condition}", {"np": np})
    mod = eval(f"lambda x, b, h, i, j, s: x * 0.5 + ({amount}) * 0.125", {"np": np})
    shape = (2, 4, 5, 7)
    seen = formula.call_mod(keep, shape, None, "bottom_right", None, 2)
    ref = formula.forward(q, k, v, score_mod=mod, mask=seen)
    o, lse = tilewise.attention(q, k, v, score_mod=mod, mask=masks.mod(keep), return_lse=True)
    formula.assert_close(lse, ref.lse)
    formula.assert_close(o, ref.o)
