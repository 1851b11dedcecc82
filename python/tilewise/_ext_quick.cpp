// Calls that repeat: the way from torch tensors to the C ABI without the Python in between.
//
// A call whose options are numbers and words only (no arrays, masks or functions; an operator's mask is a word, whose
// arrays come with every call) is taken apart in Python the first time, and what came out, a tilewise_problem, is kept
// under those options. From then on a call reads q, k and v
// through torch's table of C functions for DLPack (__dlpack_c_exchange_api__), puts them into the problem, makes the
// outputs with torch's own functions, and runs. Whatever is not as plain as that (other kinds of tensors, devices that
// differ, negated views, no memory) gives None, and the caller takes the general way, which knows all cases and all
// words of refusal. Nothing that is kept refers to a tensor.
//
// Everything here runs with the GIL, which guards what is kept, until the work itself is done.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>

#include "_ext.hpp"

namespace tilewise::python {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// DLPack, as much of its header (version 1) as is read here: https://dmlc.github.io/dlpack/latest/c_api.html

struct DLTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
};
static_assert(sizeof(DLTensor) == 48);

struct DLManagedTensor {  // DLManagedTensorVersioned of the header
    uint32_t major, minor;
    void* context;
    void (*deleter)(DLManagedTensor* self);  // may be null
    uint64_t flags;
    DLTensor tensor;
};

struct ExchangeApi {
    struct {
        uint32_t major, minor;
        void* previous;
    } header;
    // A new tensor like the prototype, on the current stream; it takes a function that hears of errors.
    int (*allocate)(DLTensor* prototype, DLManagedTensor** out, void* context,
                    void (*set_error)(void* context, const char* kind, const char* message));
    void *from_object, *to_object;
    int (*tensor_of)(void* object, DLTensor* out);  // no reference is taken; may be null
    int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

constexpr int32_t kDLCpu = 1, kDLCuda = 2;

int32_t dtype_of(const DLTensor& t) {
    if (t.lanes != 1) return TILEWISE_NONE;
    const auto one_of = [&](int32_t b8, int32_t b16, int32_t b32, int32_t b64) -> int32_t {
        return t.bits == 8 ? b8 : t.bits == 16 ? b16 : t.bits == 32 ? b32 : t.bits == 64 ? b64 : TILEWISE_NONE;
    };
    switch (t.code) {
        case 0: return one_of(TILEWISE_INT8, TILEWISE_INT16, TILEWISE_INT32, TILEWISE_INT64);
        case 1: return one_of(TILEWISE_UINT8, TILEWISE_NONE, TILEWISE_UINT32, TILEWISE_NONE);
        case 2: return one_of(TILEWISE_NONE, TILEWISE_FLOAT16, TILEWISE_FLOAT32, TILEWISE_FLOAT64);
        case 4: return one_of(TILEWISE_NONE, TILEWISE_BFLOAT16, TILEWISE_NONE, TILEWISE_NONE);
        case 6: return one_of(TILEWISE_BOOL, TILEWISE_NONE, TILEWISE_NONE, TILEWISE_NONE);
        default: return TILEWISE_NONE;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// torch, as Python introduced it. The references are kept for good: torch is never unloaded.

struct Torch {
    const ExchangeApi* api = nullptr;
    PyTypeObject *tensor = nullptr, *parameter = nullptr;
    PyObject *empty_strided = nullptr, *empty_like = nullptr;
    std::array<PyObject*, TILEWISE_UINT32 + 1> dtypes{};
    PyObject *requires_grad = nullptr, *is_neg = nullptr, *device = nullptr, *names = nullptr;
};
Torch torch;

// torch.Tensor, torch.nn.Parameter, the capsule with the table, torch.empty_strided, torch.empty_like,
// {tilewise_dtype: torch.dtype}
bool set_torch(nb::type_object tensor, nb::type_object parameter, nb::handle capsule, nb::object empty_strided,
               nb::object empty_like, const nb::dict& dtypes) {
    const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!api) throw nb::python_error();
    if (api->header.major != 1 || !api->tensor_of || !api->current_stream) return false;
    Torch made;
    made.api = api;
    made.tensor = reinterpret_cast<PyTypeObject*>(tensor.release().ptr());
    made.parameter = reinterpret_cast<PyTypeObject*>(parameter.release().ptr());
    made.empty_strided = empty_strided.release().ptr();
    made.empty_like = empty_like.release().ptr();
    for (const auto& [number, dtype] : dtypes) {
        const int64_t n = to_int(number.ptr());
        if (n > 0 && n <= TILEWISE_UINT32) made.dtypes[static_cast<size_t>(n)] = dtype.inc_ref().ptr();
    }
    made.requires_grad = PyUnicode_InternFromString("requires_grad");
    made.is_neg = PyObject_GetAttrString(reinterpret_cast<PyObject*>(made.tensor), "is_neg");  // found once
    if (!made.is_neg) throw nb::python_error();
    made.device = PyUnicode_InternFromString("device");
    made.names = nb::make_tuple("dtype", "device").release().ptr();
    torch = made;
    return true;
}

struct Device {
    int32_t type = kDLCpu, index = 0;
    bool operator==(const Device&) const = default;
    [[nodiscard]] bool cuda() const { return type == kDLCuda; }
};

bool is_true(nb::object&& flag) {
    if (!flag.is_valid()) throw nb::python_error();
    return flag.ptr() == Py_True;
}
bool wants_gradient(nb::handle tensor) {
    return is_true(nb::steal(PyObject_GetAttr(tensor.ptr(), torch.requires_grad)));
}

// A tensor as the C ABI sees it; nothing if it is not a plain one.
struct Read {
    tilewise_tensor tensor;
    Device device;
};
std::optional<Read> read(nb::handle object, bool new_one = false) {
    const PyTypeObject* type = Py_TYPE(object.ptr());
    if (type != torch.tensor && type != torch.parameter) return {};
    DLTensor seen{};
    if (torch.api->tensor_of(object.ptr(), &seen) != 0) {  // no memory, or a layout that is not strided
        PyErr_Clear();
        return {};
    }
    const int32_t dtype = dtype_of(seen);
    if (dtype == TILEWISE_NONE || (seen.device_type != kDLCpu && seen.device_type != kDLCuda)) return {};
    if (seen.ndim < 1 || seen.ndim > TILEWISE_MAX_RANK || !seen.shape || !seen.strides) return {};
    Read out{};
    out.device = {seen.device_type, seen.device_id};
    out.tensor.dtype = dtype;
    out.tensor.rank = seen.ndim;
    bool empty = false;
    for (int32_t d = 0; d < seen.ndim; ++d) {
        out.tensor.shape[d] = seen.shape[d];
        out.tensor.strides[d] = seen.strides[d];
        empty = empty || seen.shape[d] == 0;
    }
    if (!seen.data && !empty) return {};  // a lazy zero
    out.tensor.data = static_cast<char*>(seen.data) + (seen.data ? seen.byte_offset : 0);
    // The sign of a negated view is not in its memory. A tensor that was just made is no view.
    if (!new_one && is_true(nb::steal(PyObject_CallOneArg(torch.is_neg, object.ptr())))) return {};
    return out;
}

bool is_contiguous(const tilewise_tensor& t) {
    int64_t expected = 1;
    bool contiguous = true;
    for (int32_t d = t.rank - 1; d >= 0; --d) {
        if (t.shape[d] == 0) return true;
        if (t.shape[d] == 1) continue;
        contiguous = contiguous && t.strides[d] == expected;
        expected *= t.shape[d];
    }
    return contiguous;
}

// Axes from innermost to outermost in memory: the rule of torch.empty_like, an insertion sort by stride in which stride
// 0 compares equal to everything, so that such axes keep their place among the others.
std::vector<int32_t> axes_by_stride(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
    const auto rank = static_cast<int32_t>(shape.size());
    std::vector<int32_t> order;
    for (int32_t axis = rank - 1; axis >= 0; --axis) order.push_back(axis);
    for (int32_t n = 1; n < rank; ++n) {
        int32_t place = n;
        for (int32_t other = n - 1; other >= 0; --other) {
            const auto a = static_cast<size_t>(order[static_cast<size_t>(other)]);
            const auto b = static_cast<size_t>(order[static_cast<size_t>(place)]);
            const int64_t low = std::abs(strides[a]), high = std::abs(strides[b]);
            if (low == 0 || high == 0 || (low == high && shape[a] <= shape[b])) continue;
            if (low < high) break;
            std::swap(order[static_cast<size_t>(other)], order[static_cast<size_t>(place)]);
            place = other;
        }
    }
    return order;
}

nb::object int_tuple(const int64_t* values, int32_t count) {
    nb::object tuple = nb::steal(PyTuple_New(count));
    if (!tuple.is_valid()) throw nb::python_error();
    for (int32_t n = 0; n < count; ++n) {
        PyObject* value = PyLong_FromLongLong(values[n]);
        if (!value) throw nb::python_error();
        PyTuple_SET_ITEM(tuple.ptr(), n, value);
    }
    return tuple;
}

// A tensor and what was read of it.
struct Beside {
    nb::handle object;
    const tilewise_tensor& tensor;
};

// A new tensor on the device of `beside`. `shape` and `strides` of `what` are filled in already; its data is set here.
nb::object allocate(tilewise_tensor& what, const Beside& beside) {
    const tilewise_tensor& b = beside.tensor;
    nb::object tensor;
    if (what.dtype == b.dtype && what.rank == b.rank && std::equal(b.shape, b.shape + b.rank, what.shape) &&
        std::equal(b.strides, b.strides + b.rank, what.strides)) {  // the common case, in which torch is faster
        tensor = nb::steal(PyObject_CallOneArg(torch.empty_like, beside.object.ptr()));
    } else {
        PyObject* dtype = torch.dtypes[static_cast<size_t>(what.dtype)];
        if (!dtype) return {};
        const nb::object device = nb::steal(PyObject_GetAttr(beside.object.ptr(), torch.device));
        if (!device.is_valid()) throw nb::python_error();
        const nb::object shape = int_tuple(what.shape, what.rank), strides = int_tuple(what.strides, what.rank);
        PyObject* arguments[] = {shape.ptr(), strides.ptr(), dtype, device.ptr()};
        tensor = nb::steal(PyObject_Vectorcall(torch.empty_strided, arguments, 2, torch.names));
    }
    if (!tensor.is_valid()) throw nb::python_error();
    const std::optional<Read> seen = read(tensor, true);
    if (!seen) return {};  // a mode of torch gave something else
    what.data = seen->tensor.data;
    return tensor;
}

// Memory of torch's that no Python object stands for, which would take longer to make than the memory. It may be
// released as soon as the work is queued: whoever gets it next on this stream comes later.
class Scratch {
public:
    Scratch() = default;
    // data() is null if there is none to be had in this way.
    Scratch(size_t bytes, Device device) {
        const int64_t shape = static_cast<int64_t>(bytes);
        DLTensor prototype{nullptr, device.type, device.index, 1, 1, 8, 1, &shape, nullptr, 0};  // of uint8
        DLManagedTensor* made = nullptr;
        const auto ignore = [](void*, const char*, const char*) {};
        if (torch.api->allocate && torch.api->allocate(&prototype, &made, nullptr, ignore) == 0) managed_.reset(made);
    }
    [[nodiscard]] void* data() const {
        return managed_ ? static_cast<char*>(managed_->tensor.data) + managed_->tensor.byte_offset : nullptr;
    }

private:
    struct Release {
        void operator()(DLManagedTensor* tensor) const {
            if (tensor->deleter) tensor->deleter(tensor);
        }
    };
    std::unique_ptr<DLManagedTensor, Release> managed_;
};

void fill_row_major(tilewise_tensor& what) {
    int64_t stride = 1;
    for (int32_t d = what.rank - 1; d >= 0; --d) {
        what.strides[d] = stride;  // NOLINT(clang-analyzer-security.ArrayBound): read() lets no other ranks through
        stride *= std::max<int64_t>(what.shape[d], 1);
    }
}

// Shape and strides of a tensor like `like`, with another last extent, and its axes in memory in the order of `like`'s.
tilewise_tensor in_order_of(const tilewise_tensor& like, int64_t last) {
    tilewise_tensor out{};
    out.dtype = like.dtype;
    out.rank = like.rank;
    std::copy_n(like.shape, like.rank, out.shape);
    out.shape[std::max(like.rank, 1) - 1] = last;
    if (is_contiguous(like)) {
        fill_row_major(out);
        return out;
    }
    int64_t stride = 1;
    for (const int32_t axis :
         axes_by_stride({like.shape, like.shape + like.rank}, {like.strides, like.strides + like.rank})) {
        out.strides[axis] = stride;
        stride *= std::max<int64_t>(out.shape[axis], 1);
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// Calls

struct Shapes {  // what decides on plan and workspace, beside the options; compared as bytes, so without gaps
    Device device;
    std::array<int32_t, 3> dtype{};
    std::array<uint32_t, 3> misalignment{};
    std::array<std::array<int64_t, 4>, 3> shape{}, strides{};
};
static_assert(sizeof(Shapes) == 8 + 24 + 192);

class QuickCall {
public:
    // The options of `problem`; its q, k and v do not matter. With a plan, calls run that one.
    QuickCall(const Problem& problem, std::shared_ptr<Plan> plan)
        : options_(problem, problem.raw.q, problem.raw.k, problem.raw.v), plan_(std::move(plan)) {}

    // o, or (o, lse); None: not a plain call. `record`, unless None, is called as record(self, q, k, v) if one of them
    // requires a gradient, and gives (o, lse).
    nb::object forward(nb::handle self, nb::handle q, nb::handle k, nb::handle v, bool want_lse, nb::handle record,
                       nb::handle out, nb::handle lse, nb::handle workspace, nb::handle arrays) {
        tilewise_problem raw;
        Device place;
        std::vector<tilewise_tensor> held;
        if (!fill(raw, place, held, q, k, v, arrays)) return nb::none();
        if (!record.is_none() && (wants_gradient(q) || wants_gradient(k) || wants_gradient(v))) {
            nb::object both = record(self, q, k, v);
            return want_lse ? both : nb::object(both[0]);
        }
        const Beside beside{q, raw.q};
        tilewise_forward_args args;
        tilewise_forward_args_init(&args);
        args.o = in_order_of(raw.q, raw.v.shape[3]);
        const nb::object o = out.is_none() ? allocate(args.o, beside) : given(out, place, args.o);
        if (!o.is_valid()) return nb::none();
        nb::object sums;
        if (want_lse || !lse.is_none()) {
            args.lse.dtype = raw.q.dtype == TILEWISE_FLOAT64 ? TILEWISE_FLOAT64 : TILEWISE_FLOAT32;
            args.lse.rank = 3;
            const bool heads_first = raw.layout == TILEWISE_BHSD;
            args.lse.shape[0] = raw.q.shape[0];
            args.lse.shape[1] = raw.q.shape[heads_first ? 1 : 2];
            args.lse.shape[2] = raw.q.shape[heads_first ? 2 : 1];
            fill_row_major(args.lse);
            sums = lse.is_none() ? allocate(args.lse, beside) : given(lse, place, args.lse);
            if (!sums.is_valid()) return nb::none();
        }
        const bool done = run(raw, false, place, q, workspace, [&](const Plan* plan, const Where& where) {
            return plan ? tilewise_plan_forward(plan->raw, &raw, &args, where.workspace, where.bytes, where.stream)
                        : tilewise_forward(&raw, &args);
        });
        if (!done) return nb::none();
        return sums.is_valid() ? nb::object(nb::make_tuple(o, sums)) : o;
    }

    // (dq, dk, dv), None for each that is not wanted; None: not a plain call. dlse may be None.
    nb::object backward(nb::handle d_o, nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse,
                        nb::handle dlse, bool want_dq, bool want_dk, bool want_dv, nb::handle arrays) {
        tilewise_problem raw;
        Device place;
        std::vector<tilewise_tensor> held;
        if (!fill(raw, place, held, q, k, v, arrays)) return nb::none();
        tilewise_backward_args args;
        tilewise_backward_args_init(&args);
        for (const auto& [object, target] :
             {std::pair{d_o, &args.d_o}, {o, &args.o}, {lse, &args.lse}, {dlse, &args.dlse}}) {
            if (object.is_none()) continue;
            const std::optional<Read> seen = read(object);
            if (!seen || seen->device != place) return nb::none();
            *target = seen->tensor;
        }
        const auto gradient = [](bool wanted, const Beside& like, tilewise_tensor& target) -> nb::object {
            if (!wanted) return nb::none();
            target = in_order_of(like.tensor, like.tensor.shape[3]);
            return allocate(target, like);
        };
        const nb::object dq = gradient(want_dq, {q, raw.q}, args.dq), dk = gradient(want_dk, {k, raw.k}, args.dk),
                         dv = gradient(want_dv, {v, raw.v}, args.dv);
        if (!dq.is_valid() || !dk.is_valid() || !dv.is_valid()) return nb::none();
        run(raw, true, place, q, nb::none(), [&](const Plan* plan, const Where& where) {
            return plan ? tilewise_plan_backward(plan->raw, &raw, &args, where.workspace, where.bytes, where.stream)
                        : tilewise_backward(&raw, &args);
        });
        return nb::make_tuple(dq, dk, dv);
    }

private:
    static constexpr size_t kMaxKnown = 64;

    struct Known {
        Shapes shapes;
        std::vector<tilewise_tensor> arrays;  // instead of the address what is left of it modulo 16
        std::shared_ptr<Plan> plan;
        size_t bytes = 0;  // of workspace
    };
    struct Where {  // a run works
        void* workspace = nullptr;
        size_t bytes = 0;
        void* stream = nullptr;
    };

    bool fill(tilewise_problem& raw, Device& place, std::vector<tilewise_tensor>& held, nb::handle q, nb::handle k,
              nb::handle v, nb::handle arrays) const {
        if (!torch.api) return false;
        const std::optional<Read> a = read(q), b = read(k), c = read(v);
        if (!a || !b || !c || a->device != b->device || a->device != c->device) return false;
        if (a->tensor.rank != 4 || b->tensor.rank != 4 || c->tensor.rank != 4) return false;
        place = a->device;
        raw = options_.raw;
        if (place.cuda() && raw.backend && std::strcmp(raw.backend, "reference") == 0) return false;  // on the host
        raw.q = a->tensor, raw.k = b->tensor, raw.v = c->tensor;
        raw.device_type = place.cuda() ? TILEWISE_CUDA : TILEWISE_CPU;
        raw.device_index = place.cuda() ? place.index : 0;
        if (arrays.is_none()) return raw.num_arrays == 0;
        for (nb::handle each : arrays) {
            const std::optional<Read> seen = read(each);
            if (!seen || seen->device != place) return false;
            held.push_back(seen->tensor);
        }
        raw.arrays = held.data();
        return raw.num_arrays == static_cast<int32_t>(held.size());
    }

    // An output of the caller's. An empty object if it needs the general way.
    static nb::object given(nb::handle output, Device place, tilewise_tensor& target) {
        const std::optional<Read> seen = read(output);
        if (!seen || seen->device != place || wants_gradient(output)) return {};
        target = seen->tensor;
        return nb::borrow(output);
    }

    // The plan for a problem on a GPU, or this call's own, and the workspace that it needs.
    std::pair<std::shared_ptr<Plan>, size_t> plan_for(const tilewise_problem& raw, bool backward, Device place) {
        std::vector<Known>& list = known_[backward ? 1 : 0];
        if (generation_ != plan_cache().generation()) {  // the user cleared the cache
            for (auto& each : known_) each.clear();
            generation_ = plan_cache().generation();
        }
        Shapes shapes;
        shapes.device = place;
        size_t n = 0;
        for (const tilewise_tensor* t : {&raw.q, &raw.k, &raw.v}) {
            shapes.dtype[n] = t->dtype;
            shapes.misalignment[n] = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(t->data) % 16);
            std::copy_n(t->shape, 4, shapes.shape[n].begin());
            std::copy_n(t->strides, 4, shapes.strides[n++].begin());
        }
        std::vector<tilewise_tensor> arrays(raw.arrays, raw.arrays + raw.num_arrays);
        for (tilewise_tensor& t : arrays)
            t.data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(t.data) % 16);  // NOLINT: no address any more
        const auto same_bytes = [](const tilewise_tensor& a, const tilewise_tensor& b) {
            return std::memcmp(&a, &b, sizeof a) == 0;
        };
        for (const Known& each : list) {
            if (std::memcmp(&each.shapes, &shapes, sizeof shapes) == 0 &&
                std::ranges::equal(each.arrays, arrays, same_bytes))
                return {each.plan, each.bytes};
        }
        Problem problem(options_, raw.q, raw.k, raw.v);
        problem.raw.arrays = raw.arrays;
        problem.raw.device_type = raw.device_type, problem.raw.device_index = raw.device_index;
        auto found = plan_ ? std::pair{plan_, plan_->workspace_bytes_for(problem)}
                           : plan_cache().find(problem, backward);  // other threads may run meanwhile
        if (list.size() >= kMaxKnown) list.clear();
        list.push_back({shapes, std::move(arrays), found.first, found.second});
        return found;
    }

    // Calls work(plan, where) without the GIL. False: the workspace needs the general way, which says what is wrong.
    template <class Work>
    bool run(const tilewise_problem& raw, bool backward, Device place, nb::handle q, nb::handle workspace,
             const Work& work) {
        if (!plan_ && !place.cuda()) {
            run_without_gil([&] { return work(nullptr, Where{}); });
            return true;
        }
        const auto [plan, bytes] = plan_for(raw, backward, place);
        Where where;
        Scratch scratch;
        nb::object memory;
        std::unique_ptr<void, decltype(&std::free)> own{nullptr, &std::free};
        if (!workspace.is_none()) {
            const std::optional<Read> seen = read(workspace);
            static constexpr size_t kSizes[] = {0, 8, 4, 2, 2, 8, 4, 2, 1, 1, 1, 4};
            if (!seen || seen->device != place || wants_gradient(workspace) || !is_contiguous(seen->tensor))
                return false;
            where.bytes = kSizes[seen->tensor.dtype];
            for (int32_t d = 0; d < seen->tensor.rank; ++d) where.bytes *= static_cast<size_t>(seen->tensor.shape[d]);
            where.workspace = seen->tensor.data;
            if (reinterpret_cast<uintptr_t>(where.workspace) % 64 != 0 || where.bytes < plan->workspace_bytes())
                return false;
        } else if (bytes > 0 && place.cuda()) {
            scratch = Scratch(bytes, place);
            where.workspace = scratch.data(), where.bytes = bytes;
            if (where.workspace == nullptr) {  // torch's own function raises what torch's users expect
                tilewise_tensor bytes_of{};
                bytes_of.dtype = TILEWISE_UINT8, bytes_of.rank = 1;
                bytes_of.shape[0] = static_cast<int64_t>(bytes), bytes_of.strides[0] = 1;
                memory = allocate(bytes_of, {q, raw.q});
                if (!memory.is_valid()) return false;
                where.workspace = bytes_of.data;
            }
        } else if (bytes > 0) {
            where.bytes = (bytes + 63) / 64 * 64;
            own.reset(std::aligned_alloc(64, where.bytes));
            if (!own) throw std::bad_alloc();
            where.workspace = own.get();
        }
        if (place.cuda() && torch.api->current_stream(place.type, place.index, &where.stream) != 0)
            throw nb::python_error();
        run_without_gil([&] { return work(plan.get(), where); });
        return true;
    }

    Problem options_;
    std::shared_ptr<Plan> plan_;
    std::array<std::vector<Known>, 2> known_;  // by shapes, of the forward and the backward pass
    size_t generation_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// Options that can be a key: None, True, False, and ints, floats, strings and tuples of ints, of exactly these types

bool is_plain(PyObject* value) {
    if (value == Py_None || value == Py_True || value == Py_False) return true;
    if (PyLong_CheckExact(value) || PyFloat_CheckExact(value) || PyUnicode_CheckExact(value)) return true;
    if (!PyTuple_CheckExact(value)) return false;
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(value); ++n) {
        if (!PyLong_CheckExact(PyTuple_GET_ITEM(value, n))) return false;
    }
    return true;
}

size_t hash_of(PyObject* value) {  // of a plain one
    const Py_hash_t hash = PyObject_Hash(value);
    if (hash == -1) throw nb::python_error();
    return static_cast<size_t>(hash) ^ (reinterpret_cast<uintptr_t>(Py_TYPE(value)) >> 4);
}

// 1, 1.0 and True are equal in Python, but only one of them may be allowed as the value of an option; so are 0.0 and
// -0.0.
bool same(PyObject* a, PyObject* b) {
    if (a == b) return true;
    if (Py_TYPE(a) != Py_TYPE(b)) return false;
    if (PyFloat_CheckExact(a))
        return std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(a)) == std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(b));
    const int equal = PyObject_RichCompareBool(a, b, Py_EQ);
    if (equal < 0) throw nb::python_error();
    return equal == 1;
}

// The calls that are known, by their options and by whether torch asks for deterministic algorithms.
class QuickCalls {
public:
    // A QuickCall; None: not known, but may be kept; False: its options cannot be a key.
    nb::object find(nb::handle options, bool deterministic) {
        // A loop says the same every time, mostly with the same objects: no need to hash them.
        if (last_ && last_deterministic_ == deterministic && identical(last_->options, options)) return last_->call;
        const size_t hash = hash_all(options, deterministic);
        if (hash == 0) return nb::bool_(false);
        const auto [first, last] = calls_.equal_range(hash);
        for (auto each = first; each != last; ++each) {
            if (!equal(each->second.options, options)) continue;
            last_ = &each->second, last_deterministic_ = deterministic;
            return last_->call;
        }
        return nb::none();
    }
    void keep(nb::handle options, bool deterministic, nb::object call) {
        const size_t hash = hash_all(options, deterministic);
        if (hash == 0) return;
        if (calls_.size() >= kMaxCalls) clear();  // calls in flight keep theirs
        calls_.emplace(hash, Entry{nb::borrow(options), std::move(call)});
    }
    [[nodiscard]] size_t size() const { return calls_.size(); }
    void clear() {
        last_ = nullptr;
        calls_.clear();
    }

private:
    static constexpr size_t kMaxCalls = 256;
    struct Entry {
        nb::object options, call;
    };

    // 0: not plain.
    static size_t hash_all(nb::handle options, bool deterministic) {
        if (!PyTuple_CheckExact(options.ptr())) return 0;
        size_t hash = deterministic ? 2 : 1;
        for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(options.ptr()); ++n) {
            PyObject* value = PyTuple_GET_ITEM(options.ptr(), n);
            if (!is_plain(value)) return 0;
            hash = hash * 0x9e3779b97f4a7c15u + hash_of(value);
        }
        // The lowest bits say for sure what torch asks for, and that it is not 0.
        return (hash << 2) | (deterministic ? 2 : 1);
    }
    static bool identical(nb::handle a, nb::handle b) {
        if (!PyTuple_CheckExact(b.ptr()) || PyTuple_GET_SIZE(a.ptr()) != PyTuple_GET_SIZE(b.ptr())) return false;
        for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(a.ptr()); ++n) {
            if (PyTuple_GET_ITEM(a.ptr(), n) != PyTuple_GET_ITEM(b.ptr(), n)) return false;
        }
        return true;
    }
    static bool equal(nb::handle a, nb::handle b) {
        const Py_ssize_t size = PyTuple_GET_SIZE(a.ptr());
        if (size != PyTuple_GET_SIZE(b.ptr())) return false;
        for (Py_ssize_t n = 0; n < size; ++n) {
            if (!same(PyTuple_GET_ITEM(a.ptr(), n), PyTuple_GET_ITEM(b.ptr(), n))) return false;
        }
        return true;
    }

    std::unordered_multimap<size_t, Entry> calls_;
    const Entry* last_ = nullptr;  // found last, in calls_
    bool last_deterministic_ = false;
};

// Never destroyed: it holds objects of an interpreter that may be gone.
QuickCalls& quick_calls() {
    static auto* const calls = new QuickCalls;
    return *calls;
}

}  // namespace

void bind_quick(nb::module_& m) {
    m.def("set_torch", &set_torch, nb::arg("tensor"), nb::arg("parameter"), nb::arg("exchange_api"),
          nb::arg("empty_strided"), nb::arg("empty_like"), nb::arg("dtypes"));
    m.def(
        "axes_by_stride",
        [](nb::handle shape, nb::handle strides) {
            const std::vector<int32_t> order = axes_by_stride(to_ints(shape), to_ints(strides));
            const std::vector<int64_t> outermost_first(order.rbegin(), order.rend());
            return int_tuple(outermost_first.data(), static_cast<int32_t>(outermost_first.size()));
        },
        nb::arg("shape"), nb::arg("strides"));

    nb::class_<QuickCall>(m, "QuickCall")
        .def(nb::init<const Problem&, std::shared_ptr<Plan>>(), nb::arg("problem"), nb::arg("plan").none() = nb::none())
        .def(
            "forward",
            [](nb::handle_t<QuickCall> self, nb::handle q, nb::handle k, nb::handle v, bool want_lse, nb::handle record,
               nb::handle out, nb::handle lse, nb::handle workspace, nb::handle arrays) {
                return nb::cast<QuickCall&>(self).forward(self, q, k, v, want_lse, record, out, lse, workspace, arrays);
            },
            nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("want_lse"),
            nb::arg("record").none(), nb::arg("out").none() = nb::none(), nb::arg("lse").none() = nb::none(),
            nb::arg("workspace").none() = nb::none(), nb::arg("arrays").none() = nb::none())
        .def("backward", &QuickCall::backward, nb::arg("do"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("o"),
             nb::arg("lse"), nb::arg("dlse").none(), nb::arg("want_dq"), nb::arg("want_dk"), nb::arg("want_dv"),
             nb::arg("arrays").none() = nb::none());
    m.def(
        "quick_call", [](nb::handle options, bool deterministic) { return quick_calls().find(options, deterministic); },
        nb::arg("options"), nb::arg("deterministic"));
    m.def(
        "keep_quick_call",
        [](nb::handle options, bool deterministic, nb::object call) {
            quick_calls().keep(options, deterministic, std::move(call));
        },
        nb::arg("options"), nb::arg("deterministic"), nb::arg("call"));
    m.def("num_quick_calls", [] { return quick_calls().size(); });
    m.def("clear_quick_calls", [] { quick_calls().clear(); });
}

}  // namespace tilewise::python
