// The C ABI: catches everything, keeps the last error of each thread.
#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "dropout.hpp"
#include "env.hpp"
#include "mask.hpp"
#include "merge.hpp"
#include "plan.hpp"

using namespace tilewise::core;

struct tilewise_plan {
    Plan plan;
};

namespace {

thread_local std::string kept_error;
thread_local const char* last_error = "";  // kept_error, or a literal

constexpr const char* kOutOfMemory = "out of memory: the host could not allocate. Free memory, or split the problem.";

// Where memory is short there may be none for the text either.
tilewise_status failed(Status status, const char* before, const char* what, const char* after) noexcept {
    try {
        last_error = kept_error.assign(before).append(what).append(after).c_str();
        return static_cast<tilewise_status>(status);
    } catch (...) {
        last_error = kOutOfMemory;
        return TILEWISE_OUT_OF_MEMORY;
    }
}

template <class Body>
tilewise_status guarded(Body body) {
    try {
        body();
        last_error = "";
        return TILEWISE_OK;
    } catch (const Error& error) {
        return failed(error.status(), "", error.what(), "");
    } catch (const std::bad_alloc&) {
        last_error = kOutOfMemory;
        return TILEWISE_OUT_OF_MEMORY;
    } catch (const std::exception& error) {
        return failed(Status::internal, "internal error: ", error.what(),
                      ". Please report it with the call that led here.");
    } catch (...) {
        return failed(Status::internal, "internal error of unknown kind", "",
                      ". Please report it with the call that led here.");
    }
}

template <class T>
const T& given(const T* pointer, const char* argument) {
    if (pointer == nullptr) refuse(argument, "a null pointer", "a pointer to an initialised struct or value");
    return *pointer;
}

const tilewise_problem& given_problem(const tilewise_problem* problem) {
    check_size(given(problem, "problem"), "problem");
    return *problem;
}

std::string given_text(const char* text) { return text ? text : ""; }

void check_pass(tilewise_pass pass) {
    if (pass != TILEWISE_FORWARD && pass != TILEWISE_BACKWARD)
        refuse("pass", std::to_string(pass), "TILEWISE_FORWARD (0) or TILEWISE_BACKWARD (1)");
}

// Helpers that read values on the host.
void require_host(const Problem& p) {
    if (p.device.is_cuda())
        refuse("problem", "tensors on " + describe(p.device), "tensors in host memory", "Copy them first.");
}

size_t copy_text(const std::string& text, char* buffer, size_t capacity) {
    if (buffer && capacity > 0) {
        const size_t n = std::min(text.size(), capacity - 1);
        std::memcpy(buffer, text.data(), n);
        buffer[n] = '\0';
    }
    return text.size() + 1;
}

}  // namespace

extern "C" {

uint32_t tilewise_abi_version(void) { return TILEWISE_ABI_VERSION; }
const char* tilewise_version(void) { return TILEWISE_VERSION_STRING; }
const char* tilewise_last_error(void) { return last_error; }

void tilewise_problem_init(tilewise_problem* problem) {
    if (problem == nullptr) return;
    *problem = tilewise_problem{};
    problem->struct_size = sizeof(tilewise_problem);
    problem->abi_version = TILEWISE_ABI_VERSION;
    problem->window_left = -1;
    problem->window_right = -1;
}

void tilewise_forward_args_init(tilewise_forward_args* args) {
    if (args == nullptr) return;
    *args = tilewise_forward_args{};
    args->struct_size = sizeof(tilewise_forward_args);
}

void tilewise_backward_args_init(tilewise_backward_args* args) {
    if (args == nullptr) return;
    *args = tilewise_backward_args{};
    args->struct_size = sizeof(tilewise_backward_args);
}

tilewise_status tilewise_plan_create(const tilewise_problem* problem, tilewise_pass pass, tilewise_plan** plan) {
    return guarded([&] {
        if (plan == nullptr) refuse("plan", "a null pointer", "a pointer to receive the plan");
        check_pass(pass);
        *plan = new tilewise_plan{Plan(given(problem, "problem"), static_cast<Pass>(pass))};
    });
}

void tilewise_plan_destroy(tilewise_plan* plan) { delete plan; }

size_t tilewise_plan_explain(const tilewise_plan* plan, char* buffer, size_t capacity) {
    std::string text;
    guarded([&] { text = given(plan, "plan").plan.explain(); });
    return copy_text(text, buffer, capacity);
}

tilewise_status tilewise_plan_workspace_size(const tilewise_plan* plan, size_t* bytes) {
    return guarded([&] {
        if (bytes == nullptr) refuse("bytes", "a null pointer", "a pointer to receive the size");
        *bytes = given(plan, "plan").plan.workspace_bytes();
    });
}

tilewise_status tilewise_plan_workspace_size_for(const tilewise_plan* plan, const tilewise_problem* problem,
                                                 size_t* bytes) {
    return guarded([&] {
        if (bytes == nullptr) refuse("bytes", "a null pointer", "a pointer to receive the size");
        *bytes = given(plan, "plan").plan.workspace_bytes_for(given(problem, "problem"));
    });
}

tilewise_status tilewise_plan_forward(const tilewise_plan* plan, const tilewise_problem* problem,
                                      const tilewise_forward_args* args, void* workspace, size_t workspace_bytes,
                                      void* stream) {
    return guarded([&] {
        given(plan, "plan")
            .plan.forward(given(problem, "problem"), given(args, "args"), {workspace, workspace_bytes, stream});
    });
}

tilewise_status tilewise_plan_backward(const tilewise_plan* plan, const tilewise_problem* problem,
                                       const tilewise_backward_args* args, void* workspace, size_t workspace_bytes,
                                       void* stream) {
    return guarded([&] {
        given(plan, "plan")
            .plan.backward(given(problem, "problem"), given(args, "args"), {workspace, workspace_bytes, stream});
    });
}

tilewise_status tilewise_forward(const tilewise_problem* problem, const tilewise_forward_args* args) {
    return guarded([&] { forward(given(problem, "problem"), given(args, "args")); });
}

tilewise_status tilewise_backward(const tilewise_problem* problem, const tilewise_backward_args* args) {
    return guarded([&] { backward(given(problem, "problem"), given(args, "args")); });
}

tilewise_status tilewise_dropout_mask(int64_t seed, int64_t offset, double dropout_p, const tilewise_tensor* out) {
    return guarded([&] {
        const Array array = make_array(given(out, "out"), "out");
        if (array.rank != 4 || (array.dtype != DType::u8 && array.dtype != DType::boolean)) {
            refuse("out", describe(array), "uint8 or bool [batch, num_heads_q, seqlen_q, seqlen_kv]");
        }
        if (array.data == nullptr && array.size() != 0) refuse("out", "a null pointer", "a pointer to its elements");
        if (!(dropout_p >= 0 && dropout_p < 1))
            refuse("dropout_p", std::to_string(dropout_p), "a probability in [0, 1)");
        const uint32_t threshold = dropout_threshold(dropout_p);
        std::string row(static_cast<size_t>(array.shape[3]), '\0');
        for (int64_t b = 0; b < array.shape[0]; ++b) {
            for (int64_t h = 0; h < array.shape[1]; ++h) {
                for (int64_t i = 0; i < array.shape[2]; ++i) {
                    auto* keep = reinterpret_cast<uint8_t*>(row.data());
                    dropout_row(seed, offset, b * array.shape[1] + h, i, {0, array.shape[3]}, threshold, keep);
                    auto* target = static_cast<uint8_t*>(array.data) + b * array.stride[0] + h * array.stride[1] +
                                   i * array.stride[2];
                    for (int64_t j = 0; j < array.shape[3]; ++j) target[j * array.stride[3]] = keep[j];
                }
            }
        }
    });
}

tilewise_status tilewise_attn_probs(const tilewise_problem* problem, const tilewise_tensor* lse, const int64_t* rows,
                                    int64_t num_rows, const int64_t* heads, int64_t num_heads,
                                    const tilewise_tensor* out) {
    return guarded([&] {
        tilewise_problem raw = given_problem(problem);
        raw.v = raw.k;  // probabilities do not depend on v
        const Problem p = make_problem(raw);
        require_host(p);
        const auto check_indices = [](const int64_t* values, int64_t count, int64_t limit, const char* argument) {
            if (count < 0 || (count > 0 && values == nullptr)) {
                refuse(argument, values ? std::to_string(count) + " entries" : "a null pointer", "a list of indices");
            }
            for (int64_t n = 0; n < count; ++n) {
                if (values[n] < 0 || values[n] >= limit) {
                    refuse(argument, std::to_string(values[n]), "0 to " + std::to_string(limit - 1));
                }
            }
        };
        check_indices(rows, num_rows, p.packed_q ? p.max_seqlen_q : p.q_rows, "rows");
        check_indices(heads, num_heads, p.num_heads_q, "heads");
        const Array array = make_array(given(out, "out"), "out");
        const int64_t keys = p.packed_kv ? p.max_seqlen_kv : p.kv_rows;
        if (array.rank != 4 || (array.dtype != DType::f32 && array.dtype != DType::f64) || array.shape[0] != p.batch ||
            array.shape[1] != num_heads || array.shape[2] != num_rows || array.shape[3] != keys) {
            refuse("out", describe(array),
                   "float32 or float64 [batch, heads, rows, seqlen_kv] = [" + std::to_string(p.batch) + ", " +
                       std::to_string(num_heads) + ", " + std::to_string(num_rows) + ", " + std::to_string(keys) + "]");
        }
        if (array.data == nullptr && array.size() != 0) refuse("out", "a null pointer", "a pointer to its elements");
        const Rows3 lse_rows = lse ? view_lse(*lse, "lse", p) : Rows3{};
        attn_probs(p, lse_rows, {rows, static_cast<size_t>(num_rows)}, {heads, static_cast<size_t>(num_heads)}, array);
    });
}

tilewise_status tilewise_merge(const tilewise_tensor* o_parts, const tilewise_tensor* lse_parts,
                               const tilewise_tensor* o_out, const tilewise_tensor* lse_out) {
    return guarded([&] {
        const auto array = [](const tilewise_tensor* tensor, const char* argument) {
            const Array a = make_array(given(tensor, argument), argument);
            if (!a || (a.data == nullptr && a.size() != 0)) refuse(argument, "no data", "a tensor with data");
            return a;
        };
        merge(array(o_parts, "o_parts"), array(lse_parts, "lse_parts"), array(o_out, "o_out"),
              array(lse_out, "lse_out"));
    });
}

tilewise_status tilewise_mask_tiles(const tilewise_problem* problem, int64_t b, int64_t h, int64_t tile_m,
                                    int64_t tile_n, uint8_t* out, size_t capacity, size_t* count) {
    return guarded([&] {
        const Problem p = make_problem(given_problem(problem));
        require_host(p);
        if (count == nullptr) refuse("count", "a null pointer", "a pointer to receive the number of tiles");
        if (b < 0 || b >= p.batch) refuse("b", std::to_string(b), "0 to batch - 1 = " + std::to_string(p.batch - 1));
        if (h < 0 || h >= p.num_heads_q)
            refuse("h", std::to_string(h), "0 to num_heads_q - 1 = " + std::to_string(p.num_heads_q - 1));
        if (tile_m < 1 || tile_n < 1)
            refuse("tile_m, tile_n", std::to_string(tile_m) + ", " + std::to_string(tile_n), ">= 1");
        const Sequence& s = p.sequences[static_cast<size_t>(b)];
        tile_m = std::min(tile_m, std::max<int64_t>(s.q_len, 1));
        tile_n = std::min(tile_n, std::max<int64_t>(s.kv_len, 1));
        const int64_t rows = (s.q_len + tile_m - 1) / tile_m, columns = (s.kv_len + tile_n - 1) / tile_n;
        *count = static_cast<size_t>(rows * columns);
        if (out == nullptr) return;
        if (capacity < *count) refuse("capacity", std::to_string(capacity), "at least " + std::to_string(*count));
        const BoundMask mask(p);
        for (int64_t row = 0; row < rows; ++row) {
            const Range i{row * tile_m, std::min((row + 1) * tile_m, s.q_len)};
            for (int64_t column = 0; column < columns; ++column) {
                const Range j{column * tile_n, std::min((column + 1) * tile_n, s.kv_len)};
                out[row * columns + column] = static_cast<uint8_t>(mask.classify(b, h, i, j));
            }
        }
    });
}

tilewise_status tilewise_set_parallel_for(tilewise_parallel_for function, void* user, int32_t num_threads_of_host) {
    return guarded([&] {
        if (function != nullptr && num_threads_of_host < 1) {
            refuse("num_threads", std::to_string(num_threads_of_host), ">= 1");
        }
        set_parallel_for(function, user, num_threads_of_host);
    });
}

tilewise_status tilewise_set_num_threads(int32_t count) {
    return guarded([&] {
        if (count < 0 || count > 4096) refuse("num_threads", std::to_string(count), "0 (follow the run time) to 4096");
        set_num_threads(count);
    });
}

int32_t tilewise_num_threads(void) {
    int32_t count = 1;
    guarded([&] { count = num_threads(); });
    return count;
}

tilewise_status tilewise_set_nvrtc_path(const char* directories) {
    return guarded([&] {
        const std::string text = given_text(directories);
        std::vector<std::string> list;
        for (size_t at = 0; at < text.size();) {
            const size_t end = std::min(text.find(':', at), text.size());
            if (end > at) list.push_back(text.substr(at, end - at));
            at = end + 1;
        }
        set_nvrtc_path(std::move(list));
    });
}

tilewise_status tilewise_compile(const tilewise_problem* problem, tilewise_pass pass, const char* arch,
                                 const char* directory, char* report, size_t capacity, size_t* needed) {
    return guarded([&] {
        check_pass(pass);
        tilewise_problem raw = given_problem(problem);
        raw.device_type = TILEWISE_CUDA;
        const Problem p = make_problem(raw, false);
        const size_t size = copy_text(
            compile_kernels(p, static_cast<Pass>(pass), given_text(arch), given_text(directory)), report, capacity);
        if (needed != nullptr) *needed = size;
    });
}

tilewise_status tilewise_cache_list(const char* directory, int32_t verify, char* text, size_t capacity,
                                    size_t* needed) {
    return guarded([&] {
        const size_t size = copy_text(list_kernels(given_text(directory), verify != 0), text, capacity);
        if (needed != nullptr) *needed = size;
    });
}

tilewise_status tilewise_cache_clear(const char* directory, uint64_t* removed) {
    return guarded([&] {
        const uint64_t count = clear_kernels(given_text(directory));
        if (removed != nullptr) *removed = count;
    });
}

size_t tilewise_doctor(char* buffer, size_t capacity) {
    std::string text;
    guarded([&] {
        text = std::string("tilewise: ") + TILEWISE_VERSION_STRING + "\n" + backend_facts();
        for (const Implementation* implementation : implementations())
            text += std::string("implementation: ") + implementation->name + "\n";
        for (const EnvVariable& variable : env_variables()) {
            const std::string value = env(variable.name);
            text += std::string(variable.name) + ": " + (value.empty() ? "not set" : value) + " (" + variable.meaning +
                    ")\n";
        }
    });
    return copy_text(text, buffer, capacity);
}

}  // extern "C"
