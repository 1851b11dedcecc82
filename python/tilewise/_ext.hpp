// What the files of the extension share: views and structs of the C ABI, plans, and the cache of plans.
//
// A view of an array is the tuple (address, dtype, shape, strides): dtype is a number of tilewise_dtype, strides count
// elements. Views carry no ownership; the Python side keeps the arrays alive until the call is over.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdlib>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tilewise/tilewise.h"

namespace tilewise::python {

namespace nb = nanobind;

[[noreturn]] inline void raise_status(int status) {
    const std::string message = tilewise_last_error();
    const nb::object type = nb::module_::import_("tilewise._errors").attr("BY_STATUS")[nb::int_(status)];
    PyErr_SetString(type.ptr(), message.c_str());
    throw nb::python_error();
}

inline void check(tilewise_status status) {
    if (status != TILEWISE_OK) raise_status(status);
}

inline int64_t to_int(PyObject* object) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    return value;
}

inline nb::object item(nb::handle tuple, Py_ssize_t n) {
    PyObject* element = PySequence_GetItem(tuple.ptr(), n);
    if (!element) throw nb::python_error();
    return nb::steal(element);
}

// None is the absent tensor.
inline tilewise_tensor to_tensor(nb::handle view) {
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

inline std::vector<tilewise_tensor> to_tensors(nb::handle views) {
    std::vector<tilewise_tensor> tensors;
    for (nb::handle view : views) tensors.push_back(to_tensor(view));
    return tensors;
}

inline std::vector<int64_t> to_ints(nb::handle sequence) {
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
    // The options of `other` with other tensors. As many arrays, which are the caller's to set.
    Problem(const Problem& other, const tilewise_tensor& q, const tilewise_tensor& k, const tilewise_tensor& v)
        : raw(other.raw) {
        raw.q = q, raw.k = k, raw.v = v, raw.arrays = nullptr;
        set_text(mask, raw.mask, other.mask);
        set_text(score_mod, raw.score_mod, other.score_mod);
        set_text(backend, raw.backend, other.backend);
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

inline tilewise_forward_args forward_args(nb::handle o, nb::handle lse) {
    tilewise_forward_args args;
    tilewise_forward_args_init(&args);
    args.o = to_tensor(o);
    args.lse = to_tensor(lse);
    return args;
}

// The views of tilewise_backward_args, in its order; `darrays` is a sequence with one view or None per array.
inline tilewise_backward_args backward_args(nb::handle views, const std::vector<tilewise_tensor>& darrays) {
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
inline std::vector<tilewise_tensor> gradient_arrays(const Problem& problem, nb::handle views) {
    std::vector<tilewise_tensor> tensors = to_tensors(views);
    if (!tensors.empty()) tensors.resize(problem.arrays.size());
    return tensors;
}

template <class Run>
void run_without_gil(const Run& run) {
    tilewise_status status = TILEWISE_OK;
    {
        const nb::gil_scoped_release release;
        status = run();
    }
    check(status);  // same thread, so the last error is still the one of this call
}

struct Plan {
    tilewise_plan* raw = nullptr;

    Plan(const Problem& problem, bool backward) {
        run_without_gil([&] {  // it may compile
            return tilewise_plan_create(&problem.raw, backward ? TILEWISE_BACKWARD : TILEWISE_FORWARD, &raw);
        });
    }
    ~Plan() { tilewise_plan_destroy(raw); }
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    [[nodiscard]] size_t workspace_bytes() const {
        size_t bytes = 0;
        check(tilewise_plan_workspace_size(raw, &bytes));
        return bytes;
    }
    [[nodiscard]] size_t workspace_bytes_for(const Problem& problem) const {
        size_t bytes = 0;
        check(tilewise_plan_workspace_size_for(raw, &problem.raw, &bytes));
        return bytes;
    }
    [[nodiscard]] std::string explain() const {
        std::string text(tilewise_plan_explain(raw, nullptr, 0), '\0');
        tilewise_plan_explain(raw, text.data(), text.size());
        while (!text.empty() && text.back() == '\0') text.pop_back();
        return text;
    }
};

inline void* to_pointer(uintptr_t address) {
    return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr): Python hands over numbers
}

// A run's scratch: the caller's, or (on the CPU) memory of our own for the time of the run.
struct Workspace {
    std::unique_ptr<void, decltype(&std::free)> own{nullptr, &std::free};
    void* data = nullptr;
    size_t bytes = 0;

    Workspace(const Plan& plan, const Problem& problem, uintptr_t address, size_t given) {
        if (address || problem.raw.device_type != TILEWISE_CPU) {
            data = to_pointer(address);
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

// Plans of recent calls on CUDA tensors, where deciding means compiling. Found by what a plan is bound to and nothing
// else: dtypes, head counts, dims, layout, alignment, options and device, but not lengths, batch, strides or values.
// Needs the GIL.
class PlanCache {
public:
    // The plan, and the workspace that it needs for the lengths of this problem.
    std::pair<std::shared_ptr<Plan>, size_t> find(const Problem& problem, bool backward) {
        const std::string key = key_of(problem, backward);
        Entry* entry = lookup(key);
        if (!entry) {
            auto plan = std::make_shared<Plan>(problem, backward);
            entry = lookup(key);  // another thread may have been faster
            if (!entry) entry = insert(key, std::move(plan));
        }
        const std::string shapes = shapes_of(problem);
        auto known = entry->bytes.find(shapes);
        if (known == entry->bytes.end()) {
            if (entry->bytes.size() >= kMaxShapes) entry->bytes.clear();
            known = entry->bytes.emplace(shapes, entry->plan->workspace_bytes_for(problem)).first;
        }
        return {entry->plan, known->second};
    }
    [[nodiscard]] size_t size() const { return entries_.size(); }
    void clear() { entries_.clear(), places_.clear(), ++generation_; }
    [[nodiscard]] size_t generation() const { return generation_; }  // another one after each clear

private:
    static constexpr size_t kMaxPlans = 256;
    static constexpr size_t kMaxShapes = 64;

    struct Entry {
        std::string key;
        std::shared_ptr<Plan> plan;
        std::unordered_map<std::string, size_t> bytes;  // of workspace, by shapes and strides
    };
    using Entries = std::list<Entry>;  // the latest first

    Entry* lookup(const std::string& key) {
        const auto place = places_.find(key);
        if (place == places_.end()) return nullptr;
        entries_.splice(entries_.begin(), entries_, place->second);
        return &entries_.front();
    }
    Entry* insert(const std::string& key, std::shared_ptr<Plan> plan) {
        if (entries_.size() >= kMaxPlans) {
            places_.erase(entries_.back().key);
            entries_.pop_back();
        }
        entries_.push_front({key, std::move(plan), {}});
        places_[key] = entries_.begin();
        return &entries_.front();
    }

    template <class T>
    static void append(std::string& key, const T& value) {
        key.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    // Whether every row can be read in pieces of 16 bytes.
    static bool aligned(const tilewise_tensor& t) {
        static constexpr int64_t kSizes[] = {0, 8, 4, 2, 2, 8, 4, 2, 1, 1, 1, 4};
        if (t.dtype <= 0 || t.dtype > TILEWISE_UINT32 || t.rank < 1 || t.rank > TILEWISE_MAX_RANK) return false;
        if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0 || t.strides[t.rank - 1] != 1) return false;
        for (int32_t d = 0; d < t.rank - 1; ++d) {
            if (t.strides[d] * kSizes[t.dtype] % 16 != 0) return false;
        }
        return true;
    }
    static std::string key_of(const Problem& problem, bool backward) {
        const tilewise_problem& p = problem.raw;
        std::string key;
        append(key, backward);
        for (const int32_t n :
             {p.device_type, p.device_index, p.layout, p.causal, p.q_offset_mode, p.deterministic, p.batch_invariant,
              p.validate, int32_t{p.softcap > 0}, int32_t{p.window_left >= 0}, int32_t{p.window_right >= 0},
              int32_t{p.chunk > 0}, int32_t{p.dropout_p >= 0x1p-17},  // less is rounded to no dropout
              p.num_arrays, p.num_scalars}) {
            append(key, n);
        }
        // Heads and dims, from where they stand in q and v.
        const auto axis = [](const tilewise_tensor& t, int32_t n) {
            return n >= 0 && n < t.rank && n < TILEWISE_MAX_RANK ? t.shape[n] : int64_t{-1};
        };
        for (const tilewise_tensor* t : {&p.q, &p.k, &p.v}) {
            append(key, t->dtype), append(key, t->rank), append(key, aligned(*t));
            append(key, axis(*t, t->rank == 4 && p.layout == TILEWISE_BHSD ? 1 : t->rank - 2));
            append(key, axis(*t, t->rank - 1));
        }
        for (const tilewise_tensor* t : {&p.bias, &p.alibi_slopes, &p.sinks, &p.cu_seqlens_q, &p.cu_seqlens_kv,
                                         &p.seqused_q, &p.seqused_kv, &p.leftpad_kv, &p.q_offset, &p.seed_offset}) {
            append(key, t->dtype), append(key, t->rank);
        }
        for (const tilewise_tensor& t : problem.arrays) append(key, t.dtype), append(key, t.rank);
        // Lengths first: texts next to each other must not be taken for one another.
        for (const std::string* text : {&problem.mask, &problem.score_mod, &problem.backend}) {
            append(key, text->size());
            key += *text;
        }
        return key;
    }
    // Everything of a problem that a workspace can depend on beside the plan, which is all but addresses and values.
    static std::string shapes_of(const Problem& problem) {
        std::string key;
        const tilewise_problem& p = problem.raw;
        const auto add = [&](const tilewise_tensor& t) {
            append(key, t.dtype);
            if (t.dtype == TILEWISE_NONE) return;
            append(key, t.rank), append(key, t.shape), append(key, t.strides);
            append(key, reinterpret_cast<uintptr_t>(t.data) % 16);
        };
        for (const tilewise_tensor* t :
             {&p.q, &p.k, &p.v, &p.bias, &p.alibi_slopes, &p.sinks, &p.cu_seqlens_q, &p.cu_seqlens_kv, &p.seqused_q,
              &p.seqused_kv, &p.leftpad_kv, &p.q_offset, &p.seed_offset}) {
            add(*t);
        }
        for (const tilewise_tensor& t : problem.arrays) add(t);
        for (const int64_t n :
             {p.max_seqlen_q, p.max_seqlen_kv, p.window_left, p.window_right, p.chunk, p.q_offset_value}) {
            append(key, n);
        }
        return key;
    }

    size_t generation_ = 0;
    Entries entries_;
    std::unordered_map<std::string, Entries::iterator> places_;
};

// Never destroyed: at exit the driver may be gone before the plans.
inline PlanCache& plan_cache() {
    static auto* const cache = new PlanCache;
    return *cache;
}

// Of _ext_quick.cpp.
void bind_quick(nb::module_& m);

}  // namespace tilewise::python
