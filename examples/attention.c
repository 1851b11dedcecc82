/* The C ABI from C: one call, and a clear message when it is refused. */
#include <stdio.h>

#include <tilewise/tilewise.h>

static tilewise_tensor dense(float* data, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim) {
    tilewise_tensor t = {0};
    t.data = data;
    t.dtype = TILEWISE_FLOAT32;
    t.rank = 4;
    t.shape[0] = batch, t.shape[1] = seqlen, t.shape[2] = heads, t.shape[3] = dim;
    t.strides[3] = 1, t.strides[2] = dim, t.strides[1] = heads * dim, t.strides[0] = seqlen * heads * dim;
    return t;
}

int main(void) {
    enum { kSeqlen = 64, kHeads = 2, kDim = 16, kSize = kSeqlen * kHeads * kDim };
    static float q[kSize], k[kSize], v[kSize], o[kSize];
    for (int n = 0; n < kSize; ++n) {
        q[n] = (float)(n % 7) * 0.1f;
        k[n] = (float)(n % 5) * 0.2f;
        v[n] = (float)(n % 3);
    }

    tilewise_problem problem;
    tilewise_problem_init(&problem);
    problem.q = dense(q, 1, kSeqlen, kHeads, kDim);
    problem.k = dense(k, 1, kSeqlen, kHeads, kDim);
    problem.v = dense(v, 1, kSeqlen, kHeads, kDim);
    problem.causal = 1;
    problem.mask = "window(16,0)";

    tilewise_forward_args args;
    tilewise_forward_args_init(&args);
    args.o = dense(o, 1, kSeqlen, kHeads, kDim);
    if (tilewise_forward(&problem, &args) != TILEWISE_OK) {
        fprintf(stderr, "%s\n", tilewise_last_error());
        return 1;
    }
    printf("tilewise %s: o[last row] = %.4f %.4f %.4f ...\n", tilewise_version(), o[kSize - kDim], o[kSize - kDim + 1],
           o[kSize - kDim + 2]);

    problem.window_left = -3; /* refused: only -1 means unbounded */
    if (tilewise_forward(&problem, &args) == TILEWISE_OK) return 1;
    printf("as it should be, refused: %s\n", tilewise_last_error());
    return 0;
}
