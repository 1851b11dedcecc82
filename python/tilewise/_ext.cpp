// The bindings: tuples and numbers of Python become the structs of the C ABI, statuses become exceptions. Only the
// files _ext* know Python.
#include "_ext.hpp"

using namespace tilewise::python;

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
    TILEWISE_NUMBER(device_type);
    TILEWISE_NUMBER(device_index);
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
    TILEWISE_VIEW(seed_offset);
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
        .def("workspace_bytes_for", &Plan::workspace_bytes_for, nb::arg("problem"))
        .def("explain", &Plan::explain)
        .def(
            "forward",
            [](const Plan& plan, const Problem& p, nb::handle o, nb::handle lse, uintptr_t workspace, size_t bytes,
               uintptr_t stream) {
                const tilewise_forward_args args = forward_args(o, lse);
                const Workspace scratch(plan, p, workspace, bytes);
                run_without_gil([&] {
                    return tilewise_plan_forward(plan.raw, &p.raw, &args, scratch.data, scratch.bytes,
                                                 to_pointer(stream));
                });
            },
            nb::arg("problem"), nb::arg("o"), nb::arg("lse").none(), nb::arg("workspace"), nb::arg("workspace_bytes"),
            nb::arg("stream") = 0)
        .def(
            "backward",
            [](const Plan& plan, const Problem& p, nb::handle views, nb::handle darrays, uintptr_t workspace,
               size_t bytes, uintptr_t stream) {
                const std::vector<tilewise_tensor> gradients = gradient_arrays(p, darrays);
                const tilewise_backward_args args = backward_args(views, gradients);
                const Workspace scratch(plan, p, workspace, bytes);
                run_without_gil([&] {
                    return tilewise_plan_backward(plan.raw, &p.raw, &args, scratch.data, scratch.bytes,
                                                  to_pointer(stream));
                });
            },
            nb::arg("problem"), nb::arg("views"), nb::arg("darrays"), nb::arg("workspace"), nb::arg("workspace_bytes"),
            nb::arg("stream") = 0);
    m.def(
        "prepare", [](const Problem& p, bool backward) { return plan_cache().find(p, backward); }, nb::arg("problem"),
        nb::arg("backward"));
    m.def("num_plans", [] { return plan_cache().size(); });
    m.def("clear_plans", [] { plan_cache().clear(); });

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

    m.def(
        "compile",
        [](const Problem& p, bool backward, const std::string& arch, const std::string& directory) {
            std::string report(size_t{1} << 20, '\0');  // kernels of one problem: a few lines, and their warnings
            size_t needed = 0;
            run_without_gil([&] {
                return tilewise_compile(&p.raw, backward ? TILEWISE_BACKWARD : TILEWISE_FORWARD, arch.c_str(),
                                        directory.c_str(), report.data(), report.size(), &needed);
            });
            report.resize(std::min(needed, report.size()) - 1);
            return report;
        },
        nb::arg("problem"), nb::arg("backward"), nb::arg("arch"), nb::arg("directory"));
    m.def(
        "cache_list",
        [](const std::string& directory, bool verify) {
            std::string text(size_t{1} << 16, '\0');
            size_t needed = 0;
            for (;;) {  // it may grow meanwhile
                run_without_gil(
                    [&] { return tilewise_cache_list(directory.c_str(), verify, text.data(), text.size(), &needed); });
                if (needed <= text.size()) break;
                text.resize(needed * 2);
            }
            text.resize(needed - 1);
            return text;
        },
        nb::arg("directory"), nb::arg("verify"));
    m.def(
        "cache_clear",
        [](const std::string& directory) {
            uint64_t removed = 0;
            check(tilewise_cache_clear(directory.c_str(), &removed));
            return removed;
        },
        nb::arg("directory"));

    m.def("set_num_threads", [](int32_t count) { check(tilewise_set_num_threads(count)); }, nb::arg("count"));
    m.def("num_threads", &tilewise_num_threads);
    // Directories with NVRTC, joined by colons.
    m.def(
        "set_nvrtc_path", [](const std::string& directories) { check(tilewise_set_nvrtc_path(directories.c_str())); },
        nb::arg("directories"));
    m.def("version", [] { return std::string(tilewise_version()); });
    m.def("doctor", [] {
        std::string text(tilewise_doctor(nullptr, 0), '\0');
        tilewise_doctor(text.data(), text.size());
        while (!text.empty() && text.back() == '\0') text.pop_back();
        return text;
    });
    bind_quick(m);
    nb::set_leak_warnings(false);  // graphs of torch that live to the end hold objects of ours
}
