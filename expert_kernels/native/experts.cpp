// The C interface: which kernels there are, pools of threads, and a step to the code of its format.
//
// A layer-step is one job of tiles: first projection of all experts, then second of all.
//
//     tile of the first    some units of one expert's intermediate size: their gate and up outputs
//                          for all rows that chose the expert, then the gate
//     tile of the second   some outputs of one expert's result rows
//
// A tile of the second projection needs all tiles of the first of its expert. Those were handed out
// long before, since tiles go in order; so the wait for them, by counter, is almost never one.
// Tiles have about the same number of bytes whatever the expert's shape.

#include "experts.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <vector>

#include "step_job.h"

#if defined(HR_HAS_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

struct KernelSet {
    const char* name;
    const Kernels* plain;
    const PackedKernels* packed;
    const Gates* gates;
    const LaidKernels* laid;   // null: none
    const PairKernels* pairs;  // null: none
};

#if defined(HR_HAS_X86)
// Whether the processor has AMX, with products of bytes and of bfloat16, and the system lets this
// process use it.
bool may_use_amx() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned ALL = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, bytes
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    if ((edx & ALL) != ALL) return false;
#if defined(__linux__)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}
#endif

// Ascending. A set that only some formats gain by takes the others' kernels from the one below.
std::vector<KernelSet> find_kernels() {
    std::vector<KernelSet> found{
        {"scalar", &scalar_kernels, &scalar_packed, &scalar_gates, nullptr, nullptr}};
    [[maybe_unused]] const auto add = [&found](const char* name, const Kernels& plain,
                                               const PackedKernels& packed, const Gates& gates,
                                               const LaidKernels* laid = nullptr,
                                               const PairKernels* pairs = nullptr) {
        if (has_scalar_bits(plain) && has_scalar_bits(packed) && has_scalar_bits(gates) &&
            (!laid || is_near_scalar(*laid)) && (!pairs || is_near_scalar(*pairs)))
            found.push_back({name, &plain, &packed, &gates, laid, pairs});
    };
#if defined(HR_HAS_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
        add("avx2", avx2_kernels, avx2_packed, avx2_gates);
        if (__builtin_cpu_supports("avx512f")) {
            // Zen 4 reads memory fastest when asked for little ahead in few streams, Intel's
            // processors in many.
            const bool is_amd = __builtin_cpu_is("amd");
            const Kernels& plain = is_amd ? avx512_amd_kernels : avx512_kernels;
            const bool has_words =
                __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
            add("avx512", plain, has_words ? avx512_words_packed : avx2_packed,
                avx512_gates);
            const bool has_bytes = has_words && __builtin_cpu_supports("avx512vbmi") &&
                                   __builtin_cpu_supports("avx512vnni");
            const PackedKernels& of_bytes = is_amd ? avx512_amd_packed : avx512_packed;
            if (has_bytes) add("avx512_vnni", plain, of_bytes, avx512_gates);
            const bool has_pairs = has_words && __builtin_cpu_supports("avx512bf16");
            if (has_pairs)
                add("avx512_bf16", plain, has_bytes ? of_bytes : avx512_words_packed,
                    avx512_gates, &avx512_laid, &avx512_pairs);
            if (has_bytes && may_use_amx())
                add("amx", plain, amx_packed, avx512_gates, &amx_laid,
                    has_pairs ? &avx512_pairs : nullptr);
        }
    }
#endif
#if defined(HR_HAS_NEON)
    add("neon", neon_kernels, neon_packed, scalar_gates);
#endif
    return found;
}

const std::vector<KernelSet>& all_kernels() {
    static const std::vector<KernelSet> kernels = find_kernels();
    return kernels;
}

bool is_known(const HrForm& form, int32_t isa) {
    PackedFormat format;
    if (form.kind != HR_PLAIN &&
        (form.is_transposed || form.is_interleaved || !find_packed_format(form, format)))
        return false;
    return form.hidden_size > 0 && form.intermediate_size > 0 && form.dtype >= HR_FLOAT32 &&
           form.dtype <= HR_FLOAT16 && form.gate >= HR_ACT_MUL && form.gate <= HR_ACT &&
           form.activation >= 0 && form.activation < HR_NUM_ACTIVATIONS &&
           (form.has_gate != 0) == (form.gate != HR_ACT) && isa >= 0 &&
           isa < int32_t(all_kernels().size());
}

struct ReadJob {
    const char* data;
    int64_t num_bytes;
    int64_t ahead_bytes;
    int64_t farther_bytes;  // 0: nothing is asked for farther ahead
    std::atomic<uint64_t> checksum{0};
};

// A prime number of lines for each of sixteen streams: however many there are, none lies a power of
// two behind another, where they would push each other out of a cache.
constexpr int64_t READ_TILE_BYTES = 16 * 1021 * 64;

template <int NUM_STREAMS, bool IS_FAR>
void read_tile(void* context, int64_t tile, int64_t) {
    ReadJob& job = *static_cast<ReadJob*>(context);
    const int64_t begin = tile * READ_TILE_BYTES, ahead_bytes = job.ahead_bytes;
    const int64_t far_bytes = ahead_bytes + job.farther_bytes;
    const int64_t stream_bytes =
        std::min(READ_TILE_BYTES, job.num_bytes - begin) / (64 * NUM_STREAMS) * 64;
    const char* data = job.data + begin;
    // One word of each line: what takes time is the line's way from memory.
    uint64_t total = 0;
    for (int64_t i = 0; i < stream_bytes; i += 64)
        for (int stream = 0; stream < NUM_STREAMS; stream++) {
            const char* line = data + stream * stream_bytes + i;
            uint64_t word;
            memcpy(&word, line, sizeof word);
            __builtin_prefetch(line + ahead_bytes, 0, 3);
            if (IS_FAR) __builtin_prefetch(line + far_bytes, 0, 2);
            total += word;
        }
    job.checksum.fetch_add(total, std::memory_order_relaxed);
}

template <bool IS_FAR>
TilePool::Work read_tile_in(int32_t num_streams) {
    if (num_streams >= 16) return read_tile<16, IS_FAR>;
    if (num_streams >= 8) return read_tile<8, IS_FAR>;
    if (num_streams >= 4) return read_tile<4, IS_FAR>;
    return num_streams >= 2 ? read_tile<2, IS_FAR> : read_tile<1, IS_FAR>;
}

}  // namespace

const Kernels* plain_kernels(int32_t isa) {
    const auto& kernels = all_kernels();
    return isa >= 0 && size_t(isa) < kernels.size() ? kernels[size_t(isa)].plain : nullptr;
}

const PackedKernels* packed_kernels(int32_t isa) {
    const auto& kernels = all_kernels();
    return isa >= 0 && size_t(isa) < kernels.size() ? kernels[size_t(isa)].packed : nullptr;
}

int32_t hr_abi_version() { return HR_ABI_VERSION; }

const char* hr_isa_name(int32_t index) {
    const auto& kernels = all_kernels();
    return index >= 0 && size_t(index) < kernels.size() ? kernels[size_t(index)].name : nullptr;
}

HrPool* hr_pool_create(int32_t num_threads, int32_t spin_us) {
    try {
        return new HrPool(std::max(num_threads, 1), std::max(spin_us, 0));
    } catch (const std::bad_alloc&) {
        return nullptr;
    } catch (const std::system_error&) {
        return nullptr;
    }
}

void hr_pool_destroy(HrPool* pool) { delete pool; }

int32_t hr_run(HrPool* pool, const HrForm* form, int32_t isa, const HrStep* step) {
    if (!is_known(*form, isa)) return 2;
    try {
        std::lock_guard<std::mutex> lock(pool->one_caller);
        const KernelSet& kernels = all_kernels()[size_t(isa)];
        PackedFormat format;
        if (form->kind == HR_PLAIN)
            run_plain_step(*pool, *form, *kernels.plain, kernels.laid, *kernels.gates, *step);
        else if (find_packed_format(*form, format))
            run_packed_step(*pool, *form, format, *kernels.packed, kernels.pairs, *kernels.gates,
                            *step);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

uint64_t hr_read(HrPool* pool, const void* data, int64_t num_bytes, int32_t num_streams,
                 int32_t ahead_bytes, int32_t farther_bytes) {
    std::lock_guard<std::mutex> lock(pool->one_caller);
    ReadJob job{static_cast<const char*>(data), num_bytes, ahead_bytes, farther_bytes, {}};
    const int64_t num_tiles = (num_bytes + READ_TILE_BYTES - 1) / READ_TILE_BYTES;
    const TilePool::Work work =
        farther_bytes ? read_tile_in<true>(num_streams) : read_tile_in<false>(num_streams);
    pool->threads.run(num_tiles, pool->threads.num_threads(), work, &job);
    return job.checksum.load();
}
