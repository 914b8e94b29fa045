// The C interface of the native decode step: each operation to the code of its kind.

#include "dense.h"

#include <cstring>
#include <mutex>
#include <new>

#include "step_job.h"

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
        for (int64_t i = first; i < last; i++) {
            const HrOp& op = ops[i];
            if (op.code < 0 || op.code >= HR_NUM_OPS) return 2;
            if (op.code < HR_NUM_ELEMENTWISE)
                run_elementwise(run, op);
            else if (op.code < HR_OP_GATHER)
                run_rows(run, op);
            else if (op.code < HR_OP_LINEAR)
                run_indexed(run, op);
            else if (op.code == HR_OP_LINEAR)
                run_linear(run, op);
            else if (op.code == HR_OP_ATTEND)
                run_attend(run, op);
            else if (!run_packed_linear(run, op))
                return 2;
        }
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
