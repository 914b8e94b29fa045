// The C interface of the native decode step: each operation to the code of its kind.

#include "dense.h"

#include <cstring>
#include <mutex>
#include <new>

#include "dense_values.h"
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

namespace {

// Longer than what lies between two linear layers that are worth several threads.
constexpr int64_t AWAKE_US = 1000;

// Where a linear operation's weights lie and how many bytes they are; none of any other.
struct Weights {
    const char* begin = nullptr;
    int64_t num_bytes = 0;
};

Weights weights_of(const HrOp& op) {
    if (op.code == HR_OP_PACKED_LINEAR)
        return {reinterpret_cast<const char*>(op.m), packed_linear_bytes(op)};
    if (op.code != HR_OP_LINEAR || op.b.is_in_frame) return {};
    return {reinterpret_cast<const char*>(op.b.offset),
            int64_t(op.sizes[1]) * op.sizes[2] * bytes_of(op.b.dtype)};
}

// Keeps helpers awake up to the last operation that they share, and tells them of the next one's weights.
class Ahead {
  public:
    Ahead(TilePool& threads, const HrOp* ops, int64_t first, int64_t last)
        : threads_(threads), ops_(ops), last_(last) {
        if (threads.num_threads() == 1) return;
        next_ = -1;
        pass(first);
    }

    // Operations before `first` are done.
    void pass(int64_t first) {
        if (first <= next_) return;
        const bool is_begin = next_ < 0;
        Weights weights;
        for (next_ = first; next_ < last_; next_++) {
            weights = weights_of(ops_[next_]);
            if (weights.num_bytes >= BYTES_PER_THREAD) break;
        }
        if (next_ < last_) {
            threads_.announce(weights.begin, weights.num_bytes);
            threads_.keep_awake(AWAKE_US, is_begin);
        } else if (!is_begin) {
            threads_.announce(nullptr, 0);
            threads_.keep_awake(0, false);
        }
    }

  private:
    TilePool& threads_;
    const HrOp* ops_;
    int64_t last_;
    int64_t next_ = INT64_MAX;
};

}  // namespace

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
        Ahead ahead(pool->threads, ops, first, last);
        for (int64_t i = first, num_run = 1; i < last; i += num_run) {
            const HrOp& op = ops[i];
            ahead.pass(i);
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
        ahead.pass(last);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
