// The instructions of level 6. Inline PTX is all there is to it.
#pragma once

__device__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {  // d += a b
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ unsigned pack(float x, float y) {
    unsigned two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));
    return two;
}
__device__ unsigned address(const void* shared) { return static_cast<unsigned>(__cvta_generic_to_shared(shared)); }
// Four 8 x 8 matrices as fragments. Lane l says where row l % 8 of matrix l / 8 is.
__device__ void load_fragments(unsigned (&to)[4], const Bfloat16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address(row)));
}
__device__ void load_fragments_transposed(unsigned (&to)[4], const Bfloat16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address(row)));
}
__device__ void copy_async(Bfloat16* to, const Bfloat16* from) {  // 16 bytes, without a register in between
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from) : "memory");
}
__device__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // those of this thread
