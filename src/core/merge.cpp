#include "merge.hpp"

#include <cmath>
#include <limits>

#include "error.hpp"

namespace tilewise::core {

void merge(const Array& o_parts, const Array& lse_parts, const Array& o, const Array& lse) {
    const auto require = [](bool good, const char* argument, const Array& seen, const char* allowed) {
        if (!good) refuse(argument, describe(seen), allowed);
    };
    require(o_parts.rank == 3 && is_float(o_parts.dtype), "o_parts", o_parts,
            "a float array [parts, rows, head_dim_v]");
    require(lse_parts.rank == 2 && (lse_parts.dtype == DType::f32 || lse_parts.dtype == DType::f64) &&
                lse_parts.shape[0] == o_parts.shape[0] && lse_parts.shape[1] == o_parts.shape[1],
            "lse_parts", lse_parts, "float32 or float64 [parts, rows]");
    require(o.rank == 2 && is_float(o.dtype) && o.shape[0] == o_parts.shape[1] && o.shape[1] == o_parts.shape[2], "o",
            o, "a float array [rows, head_dim_v]");
    require(lse.rank == 1 && (lse.dtype == DType::f32 || lse.dtype == DType::f64) && lse.shape[0] == o_parts.shape[1],
            "lse", lse, "float32 or float64 [rows]");
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    for (int64_t row = 0; row < o.shape[0]; ++row) {
        const auto part_lse = [&](int64_t part) {
            return load_float(lse_parts.data, lse_parts.dtype, part * lse_parts.stride[0] + row * lse_parts.stride[1]);
        };
        double maximum = -kInfinity;
        for (int64_t part = 0; part < o_parts.shape[0]; ++part) {
            const double x = part_lse(part);
            maximum = x > maximum || std::isnan(x) ? x : maximum;  // a NaN stays, and makes this row NaN
            if (std::isnan(x)) break;
        }
        double sum = 0;
        for (int64_t part = 0; part < o_parts.shape[0]; ++part) {
            if (part_lse(part) != -kInfinity) sum += std::exp(part_lse(part) - maximum);
        }
        for (int64_t d = 0; d < o.shape[1]; ++d) {
            double value = 0;
            for (int64_t part = 0; part < o_parts.shape[0]; ++part) {
                const double x = part_lse(part);
                if (x == -kInfinity) continue;
                value += std::exp(x - maximum) / sum *
                         load_float(o_parts.data, o_parts.dtype,
                                    part * o_parts.stride[0] + row * o_parts.stride[1] + d * o_parts.stride[2]);
            }
            store_float(o.data, o.dtype, row * o.stride[0] + d * o.stride[1], value);
        }
        store_float(lse.data, lse.dtype, row * lse.stride[0], sum == 0 ? -kInfinity : maximum + std::log(sum));
    }
}

}  // namespace tilewise::core
