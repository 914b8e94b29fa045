// The C interface of the native decode step: each operation to the code of its kind.

#include "dense.h"

#include <cstring>
#include <mutex>
#include <new>

#include "step_job.h"

int num_together(const HrOp* ops, int64_t num_ops) {
    const HrOp& first = ops[0];
    int count = 1;
    for (; count < num_ops && count < MAX_TOGETHER; count++) {
        const HrOp& op = ops[count];
        if (op.code != first.code || op.sizes[0] != first.sizes[0] ||
            op.sizes[2] != first.sizes[2] || op.b.dtype != first.b.dtype || op.n != first.n ||
            memcmp(&op.a, &first.a, sizeof op.a) != 0)
            break;
    }
    return count;
}

int32_t hr_dense_version() { return HR_DENSE_VERSION; }

int32_t hr_dense_run(HrPool* pool, int32_t isa, const HrOp* ops, int64_t first, int64_t last,
                     char* frame, const HrCacheLayer* caches, const void* in, int64_t in_offset,
                     int64_t num_in_bytes) {
    const Kernels* kernels = plain_kernels(isa);
    const PackedKernels* packed = packed_kernels(isa);
    if (!kernels || !packed) return 2;
    if (in) memcpy(frame + in_offset, in, size_t(num_in_bytes));
    try {
        std::lock_guard<std::mutex> lock(pool->one_caller);
        const DenseRun run{*pool, *kernels, *packed, frame, caches};
        for (int64_t i = first, num_run = 1; i < last; i += num_run) {
            const HrOp& op = ops[i];
            num_run = 1;
            if (op.code < 0 || op.code >= HR_NUM_OPS) return 2;
            if (op.code < HR_NUM_ELEMENTWISE)
                run_elementwise(run, op);
            else if (op.code < HR_OP_GATHER)
                run_rows(run, op);
            else if (op.code < HR_OP_LINEAR)
                run_indexed(run, op);
            else if (op.code == HR_OP_ATTEND)
                run_attend(run, op);
            else if (num_run = num_together(ops + i, last - i); op.code == HR_OP_LINEAR)
                run_linear(run, ops + i, int(num_run));
            else if (!run_packed_linear(run, ops + i, int(num_run)))
                return 2;
        }
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
