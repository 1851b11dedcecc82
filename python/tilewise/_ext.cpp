// The only file that knows Python: turns tuples and numbers into the structs of the C ABI, and statuses into
// exceptions.
//
// A view of an array is the tuple (address, dtype, shape, strides): dtype is a number of tilewise_dtype, strides count
// elements. Views carry no ownership; the Python side keeps the arrays alive until the call is over.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tilewise/tilewise.h"

namespace nb = nanobind;

namespace {

[[noreturn]] void raise_status(int status) {
    const std::string message = tilewise_last_error();
    const nb::object type = nb::module_::import_("tilewise._errors").attr("BY_STATUS")[nb::int_(status)];
    PyErr_SetString(type.ptr(), message.c_str());
    throw nb::python_error();
}

void check(tilewise_status status) {
    if (status != TILEWISE_OK) raise_status(status);
}

int64_t to_int(PyObject* object) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    return value;
}

nb::object item(nb::handle tuple, Py_ssize_t n) {
    PyObject* element = PySequence_GetItem(tuple.ptr(), n);
    if (!element) throw nb::python_error();
    return nb::steal(element);
}

// None is the absent tensor.
tilewise_tensor to_tensor(nb::handle view) {
    tilewise_tensor tensor{};
    if (view.is_none()) return tensor;
    const nb::object address = item(view, 0), dtype = item(view, 1), shape = item(view, 2), strides = item(view, 3);
    tensor.data = PyLong_AsVoidPtr(address.ptr());
    if (!tensor.data && PyErr_Occurred()) throw nb::python_error();
    tensor.dtype = static_cast<int32_t>(to_int(dtype.ptr()));
    const auto rank = static_cast<int64_t>(nb::len(shape));
    tensor.rank = static_cast<int32_t>(rank);
    // A rank beyond the limit travels on: the library refuses it by the argument's name.
    for (int64_t d = 0; d < rank && d < TILEWISE_MAX_RANK; ++d) {
        tensor.shape[d] = to_int(item(shape, d).ptr());
        tensor.strides[d] = to_int(item(strides, d).ptr());
    }
    return tensor;
}

std::vector<tilewise_tensor> to_tensors(nb::handle views) {
    std::vector<tilewise_tensor> tensors;
    for (nb::handle view : views) tensors.push_back(to_tensor(view));
    return tensors;
}

std::vector<int64_t> to_ints(nb::handle sequence) {
    std::vector<int64_t> values;
    for (nb::handle value : sequence) values.push_back(to_int(value.ptr()));
    return values;
}

// tilewise_problem with the memory that its pointers point to.
struct Problem {
    tilewise_problem raw;
    std::string mask, score_mod, backend;
    std::vector<tilewise_tensor> arrays;
    std::vector<double> scalars;

    Problem(nb::handle q, nb::handle k, nb::handle v, int32_t layout) {
        tilewise_problem_init(&raw);
        raw.q = to_tensor(q);
        raw.k = to_tensor(k);
        raw.v = to_tensor(v);
        raw.layout = layout;
    }
    Problem(const Problem&) = delete;
    Problem& operator=(const Problem&) = delete;

    void set_arrays(nb::handle views) {
        arrays = to_tensors(views);
        raw.arrays = arrays.data();
        raw.num_arrays = static_cast<int32_t>(arrays.size());
    }
    void set_scalars(nb::handle values) {
        scalars.clear();
        for (nb::handle value : values) scalars.push_back(nb::cast<double>(value));
        raw.scalars = scalars.data();
        raw.num_scalars = static_cast<int32_t>(scalars.size());
    }
    void set_text(std::string& owner, const char*& pointer, std::string text) {
        owner = std::move(text);
        pointer = owner.empty() ? nullptr : owner.c_str();
    }
};

tilewise_forward_args forward_args(nb::handle o, nb::handle lse) {
    tilewise_forward_args args;
    tilewise_forward_args_init(&args);
    args.o = to_tensor(o);
    args.lse = to_tensor(lse);
    return args;
}

// The views of tilewise_backward_args, in its order; `darrays` is a sequence with one view or None per array.
tilewise_backward_args backward_args(nb::handle views, const std::vector<tilewise_tensor>& darrays) {
    tilewise_backward_args args;
    tilewise_backward_args_init(&args);
    Py_ssize_t n = 0;
    for (tilewise_tensor* tensor : {&args.d_o, &args.o, &args.lse, &args.dlse, &args.dq, &args.dk, &args.dv,
                                    &args.dbias, &args.dalibi_slopes, &args.dsinks}) {
        *tensor = to_tensor(item(views, n++));
    }
    args.darrays = darrays.empty() ? nullptr : darrays.data();
    return args;
}

// darrays must have one entry for each array of the problem: the library reads that many.
std::vector<tilewise_tensor> gradient_arrays(const Problem& problem, nb::handle views) {
    std::vector<tilewise_tensor> tensors = to_tensors(views);
    if (!tensors.empty()) tensors.resize(problem.arrays.size());
    return tensors;
}

struct Plan {
    tilewise_plan* raw = nullptr;

    Plan(const Problem& problem, bool backward) {
        check(tilewise_plan_create(&problem.raw, backward ? TILEWISE_BACKWARD : TILEWISE_FORWARD, &raw));
    }
    ~Plan() { tilewise_plan_destroy(raw); }
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    [[nodiscard]] size_t workspace_bytes() const {
        size_t bytes = 0;
        check(tilewise_plan_workspace_size(raw, &bytes));
        return bytes;
    }
    [[nodiscard]] std::string explain() const {
        std::string text(tilewise_plan_explain(raw, nullptr, 0), '\0');
        tilewise_plan_explain(raw, text.data(), text.size());
        while (!text.empty() && text.back() == '\0') text.pop_back();
        return text;
    }
};

// A run's scratch: the caller's, or memory of our own for the time of the run.
struct Workspace {
    std::unique_ptr<void, decltype(&std::free)> own{nullptr, &std::free};
    void* data = nullptr;
    size_t bytes = 0;

    Workspace(const Plan& plan, uintptr_t address, size_t given) {
        if (address) {
            data = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr): Python hands over numbers
            bytes = given;
            return;
        }
        bytes = (plan.workspace_bytes() + 63) / 64 * 64;
        if (bytes == 0) return;
        own.reset(std::aligned_alloc(64, bytes));
        if (!own) throw std::bad_alloc();
        data = own.get();
    }
};

template <class Run>
void run_without_gil(const Run& run) {
    tilewise_status status = TILEWISE_OK;
    {
        const nb::gil_scoped_release release;
        status = run();
    }
    check(status);  // same thread, so the last error is still the one of this call
}

}  // namespace

NB_MODULE(_ext, m) {
    m.doc() =
        "C ABI of tilewise. A view is (address, dtype number, shape, strides in elements); None is an absent one.";

    auto problem = nb::class_<Problem>(m, "Problem");
    problem.def(nb::init<nb::handle, nb::handle, nb::handle, int32_t>(), nb::arg("q").none(), nb::arg("k").none(),
                nb::arg("v").none(), nb::arg("layout"));
#define TILEWISE_NUMBER(field)                                \
    problem.def_prop_rw(                                      \
        #field, [](const Problem& p) { return p.raw.field; }, \
        [](Problem& p, decltype(tilewise_problem::field) value) { p.raw.field = value; })
    TILEWISE_NUMBER(softmax_scale);
    TILEWISE_NUMBER(has_softmax_scale);
    TILEWISE_NUMBER(causal);
    TILEWISE_NUMBER(softcap);
    TILEWISE_NUMBER(window_left);
    TILEWISE_NUMBER(window_right);
    TILEWISE_NUMBER(chunk);
    TILEWISE_NUMBER(q_offset_mode);
    TILEWISE_NUMBER(q_offset_value);
    TILEWISE_NUMBER(max_seqlen_q);
    TILEWISE_NUMBER(max_seqlen_kv);
    TILEWISE_NUMBER(dropout_p);
    TILEWISE_NUMBER(seed);
    TILEWISE_NUMBER(offset);
    TILEWISE_NUMBER(deterministic);
    TILEWISE_NUMBER(batch_invariant);
    TILEWISE_NUMBER(validate);
#undef TILEWISE_NUMBER
#define TILEWISE_VIEW(field) \
    problem.def(             \
        "set_" #field, [](Problem& p, nb::handle view) { p.raw.field = to_tensor(view); }, nb::arg("view").none())
    TILEWISE_VIEW(q_offset);
    TILEWISE_VIEW(bias);
    TILEWISE_VIEW(alibi_slopes);
    TILEWISE_VIEW(sinks);
    TILEWISE_VIEW(cu_seqlens_q);
    TILEWISE_VIEW(cu_seqlens_kv);
    TILEWISE_VIEW(seqused_q);
    TILEWISE_VIEW(seqused_kv);
    TILEWISE_VIEW(leftpad_kv);
#undef TILEWISE_VIEW
#define TILEWISE_TEXT(field)                              \
    problem.def_prop_rw(                                  \
        #field, [](const Problem& p) { return p.field; }, \
        [](Problem& p, std::string text) { p.set_text(p.field, p.raw.field, std::move(text)); })
    TILEWISE_TEXT(mask);
    TILEWISE_TEXT(score_mod);
    TILEWISE_TEXT(backend);
#undef TILEWISE_TEXT
    problem.def("set_arrays", &Problem::set_arrays, nb::arg("views"));
    problem.def("set_scalars", &Problem::set_scalars, nb::arg("values"));

    m.def(
        "forward",
        [](const Problem& p, nb::handle o, nb::handle lse) {
            const tilewise_forward_args args = forward_args(o, lse);
            run_without_gil([&] { return tilewise_forward(&p.raw, &args); });
        },
        nb::arg("problem"), nb::arg("o"), nb::arg("lse").none());
    m.def(
        "backward",
        [](const Problem& p, nb::handle views, nb::handle darrays) {
            const std::vector<tilewise_tensor> gradients = gradient_arrays(p, darrays);
            const tilewise_backward_args args = backward_args(views, gradients);
            run_without_gil([&] { return tilewise_backward(&p.raw, &args); });
        },
        nb::arg("problem"), nb::arg("views"), nb::arg("darrays"));

    nb::class_<Plan>(m, "Plan")
        .def(nb::init<const Problem&, bool>(), nb::arg("problem"), nb::arg("backward"))
        .def_prop_ro("workspace_bytes", &Plan::workspace_bytes)
        .def("explain", &Plan::explain)
        .def(
            "forward",
            [](const Plan& plan, const Problem& p, nb::handle o, nb::handle lse, uintptr_t workspace, size_t bytes) {
                const tilewise_forward_args args = forward_args(o, lse);
                const Workspace scratch(plan, workspace, bytes);
                run_without_gil([&] {
                    return tilewise_plan_forward(plan.raw, &p.raw, &args, scratch.data, scratch.bytes, nullptr);
                });
            },
            nb::arg("problem"), nb::arg("o"), nb::arg("lse").none(), nb::arg("workspace"), nb::arg("workspace_bytes"))
        .def(
            "backward",
            [](const Plan& plan, const Problem& p, nb::handle views, nb::handle darrays, uintptr_t workspace,
               size_t bytes) {
                const std::vector<tilewise_tensor> gradients = gradient_arrays(p, darrays);
                const tilewise_backward_args args = backward_args(views, gradients);
                const Workspace scratch(plan, workspace, bytes);
                run_without_gil([&] {
                    return tilewise_plan_backward(plan.raw, &p.raw, &args, scratch.data, scratch.bytes, nullptr);
                });
            },
            nb::arg("problem"), nb::arg("views"), nb::arg("darrays"), nb::arg("workspace"), nb::arg("workspace_bytes"));

    m.def(
        "dropout_mask",
        [](int64_t seed, int64_t offset, double dropout_p, nb::handle out) {
            const tilewise_tensor tensor = to_tensor(out);
            run_without_gil([&] { return tilewise_dropout_mask(seed, offset, dropout_p, &tensor); });
        },
        nb::arg("seed"), nb::arg("offset"), nb::arg("dropout_p"), nb::arg("out"));
    m.def(
        "attn_probs",
        [](const Problem& p, nb::handle lse, nb::handle rows, nb::handle heads, nb::handle out) {
            const tilewise_tensor lse_tensor = to_tensor(lse), out_tensor = to_tensor(out);
            const std::vector<int64_t> row_list = to_ints(rows), head_list = to_ints(heads);
            run_without_gil([&] {
                return tilewise_attn_probs(&p.raw, lse_tensor.dtype == TILEWISE_NONE ? nullptr : &lse_tensor,
                                           row_list.data(), static_cast<int64_t>(row_list.size()), head_list.data(),
                                           static_cast<int64_t>(head_list.size()), &out_tensor);
            });
        },
        nb::arg("problem"), nb::arg("lse").none(), nb::arg("rows"), nb::arg("heads"), nb::arg("out"));
    m.def(
        "merge",
        [](nb::handle o_parts, nb::handle lse_parts, nb::handle o, nb::handle lse) {
            const tilewise_tensor in_o = to_tensor(o_parts), in_lse = to_tensor(lse_parts);
            const tilewise_tensor out_o = to_tensor(o), out_lse = to_tensor(lse);
            run_without_gil([&] { return tilewise_merge(&in_o, &in_lse, &out_o, &out_lse); });
        },
        nb::arg("o_parts"), nb::arg("lse_parts"), nb::arg("o"), nb::arg("lse"));
    m.def(
        "mask_tiles",
        [](const Problem& p, int64_t b, int64_t h, int64_t tile_m, int64_t tile_n) {
            size_t count = 0;
            check(tilewise_mask_tiles(&p.raw, b, h, tile_m, tile_n, nullptr, 0, &count));
            std::vector<uint8_t> classes(count);
            run_without_gil([&] {
                return tilewise_mask_tiles(&p.raw, b, h, tile_m, tile_n, classes.data(), classes.size(), &count);
            });
            return nb::bytes(classes.data(), count);
        },
        nb::arg("problem"), nb::arg("b"), nb::arg("h"), nb::arg("tile_m"), nb::arg("tile_n"));

    m.def("set_num_threads", [](int32_t count) { check(tilewise_set_num_threads(count)); }, nb::arg("count"));
    m.def("num_threads", &tilewise_num_threads);
    m.def("version", [] { return std::string(tilewise_version()); });
    m.def("doctor", [] {
        std::string text(tilewise_doctor(nullptr, 0), '\0');
        tilewise_doctor(text.data(), text.size());
        while (!text.empty() && text.back() == '\0') text.pop_back();
        return text;
    });
}
