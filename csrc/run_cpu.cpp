// The loops over one run. Three forms of each: portable, AVX2 and AVX-512.

#include "run_cpu.h"

#include <cstring>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the checksum is defined over little-endian words"
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define KVMIG_X86 1
#include <immintrin.h>
#ifndef __clang__
// GCC 12 takes the "undefined" operands inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#endif

namespace kvmig {
namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
constexpr uint64_t kFirst = 0xbf58476d1ce4e5b9u;
constexpr uint64_t kSecond = 0x94d049bb133111ebu;

inline uint64_t term(uint64_t word, int64_t index) {
    uint64_t z = word + (static_cast<uint64_t>(index) + 1) * kGolden;
    z = (z ^ (z >> 30)) * kFirst;
    z = (z ^ (z >> 27)) * kSecond;
    return z ^ (z >> 31);
}

// A word is read once, so that it is summed as it was written, whoever changes `src` meanwhile.
inline uint64_t word_of(unsigned char *dst, const unsigned char *src, std::size_t size,
                        int64_t index) {
    uint64_t word = 0;
    std::memcpy(&word, src, size);
    if (dst) std::memcpy(dst, &word, size);
    return term(word, index);
}

// The bytes [begin, end) of a run.
uint64_t words_of(const Run &run, int64_t begin, int64_t end) {
    uint64_t sum = 0;
    for (int64_t at = begin; at < end; at += 8) {
        const auto size = static_cast<std::size_t>(end - at < 8 ? end - at : 8);
        sum += word_of(run.dst ? run.dst + at : nullptr, run.src + at, size, run.first + at / 8);
    }
    return sum;
}

uint64_t portable(const Run &run) { return words_of(run, 0, run.size); }

void cached_copy(const Run &run) {
    std::memcpy(run.dst, run.src, static_cast<std::size_t>(run.size));
}

#ifdef KVMIG_X86

enum class To { kNowhere, kCache, kMemory };

constexpr int64_t kAhead = 4096;

// Block ids are in any order, and hardware fetches ahead neither into the next page nor into the
// next run: without this a gather of 18 KB runs takes twice the time.
inline void fetch_ahead(const Run &run, int64_t at, int64_t ahead) {
    const int64_t place = at + ahead;
    __builtin_prefetch(place < run.size ? run.src + place : run.next + (place - run.size));
}

// Stores past the caches are of whole vectors only: the bytes before the first in `dst`, or -1 if
// there can be no such vector.
inline int64_t head_of(const Run &run, int64_t vector) {
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(run.dst));
    const int64_t head = -address & (vector - 1);
    return head % 8 || head > run.size ? -1 : head;
}

#define KVMIG_AVX512 __attribute__((target("avx512f,avx512dq")))

KVMIG_AVX512 inline __m512i all_avx512(uint64_t word) {
    return _mm512_set1_epi64(static_cast<int64_t>(word));
}

KVMIG_AVX512 inline __m512i mix_avx512(__m512i z) {
    z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)), all_avx512(kFirst));
    z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)), all_avx512(kSecond));
    return _mm512_xor_si512(z, _mm512_srli_epi64(z, 31));
}

template <To to, bool kSum>
KVMIG_AVX512 uint64_t avx512(const Run &run) {
    const int64_t head = to == To::kMemory ? head_of(run, 64) : 0;
    if (head < 0) return avx512<To::kCache, kSum>(run);
    uint64_t sum = words_of(run, 0, head);
    const __m512i lanes = _mm512_set_epi64(8, 7, 6, 5, 4, 3, 2, 1);
    __m512i index = _mm512_mullo_epi64(
        _mm512_add_epi64(lanes, _mm512_set1_epi64(run.first + head / 8)), all_avx512(kGolden));
    const __m512i step = all_avx512(8 * kGolden);
    __m512i sums = _mm512_setzero_si512();
    const int64_t ahead = run.size < kAhead ? run.size : kAhead;
    int64_t at = head;
    for (; at + 64 <= run.size; at += 64) {
        fetch_ahead(run, at, ahead);
        const __m512i word = _mm512_loadu_si512(run.src + at);
        if (to == To::kCache) _mm512_storeu_si512(run.dst + at, word);
        if (to == To::kMemory)
            _mm512_stream_si512(reinterpret_cast<__m512i *>(run.dst + at), word);
        if (kSum) {
            sums = _mm512_add_epi64(sums, mix_avx512(_mm512_add_epi64(word, index)));
            index = _mm512_add_epi64(index, step);
        }
    }
    uint64_t each[8];
    _mm512_storeu_si512(each, sums);
    for (const uint64_t one : each) sum += one;
    return sum + words_of(run, at, run.size);
}

#define KVMIG_AVX2 __attribute__((target("avx2")))

KVMIG_AVX2 inline __m256i all_avx2(uint64_t word) {
    return _mm256_set1_epi64x(static_cast<int64_t>(word));
}

// AVX2 multiplies 32 bits only: low by low, and both cross products into the upper half.
KVMIG_AVX2 inline __m256i times_avx2(__m256i a, __m256i b) {
    const __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), b),
                                           _mm256_mul_epu32(a, _mm256_srli_epi64(b, 32)));
    return _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64(cross, 32));
}

KVMIG_AVX2 inline __m256i mix_avx2(__m256i z) {
    z = times_avx2(_mm256_xor_si256(z, _mm256_srli_epi64(z, 30)), all_avx2(kFirst));
    z = times_avx2(_mm256_xor_si256(z, _mm256_srli_epi64(z, 27)), all_avx2(kSecond));
    return _mm256_xor_si256(z, _mm256_srli_epi64(z, 31));
}

template <To to, bool kSum>
KVMIG_AVX2 uint64_t avx2(const Run &run) {
    const int64_t head = to == To::kMemory ? head_of(run, 32) : 0;
    if (head < 0) return avx2<To::kCache, kSum>(run);
    uint64_t sum = words_of(run, 0, head);
    const __m256i lanes = _mm256_set_epi64x(4, 3, 2, 1);
    __m256i index =
        times_avx2(_mm256_add_epi64(lanes, _mm256_set1_epi64x(run.first + head / 8)),
                   all_avx2(kGolden));
    const __m256i step = all_avx2(4 * kGolden);
    __m256i sums = _mm256_setzero_si256();
    const int64_t ahead = run.size < kAhead ? run.size : kAhead;
    int64_t at = head;
    for (; at + 32 <= run.size; at += 32) {
        if (at % 64 == 0) fetch_ahead(run, at, ahead);
        const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(run.src + at));
        if (to == To::kCache)
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(run.dst + at), word);
        if (to == To::kMemory)
            _mm256_stream_si256(reinterpret_cast<__m256i *>(run.dst + at), word);
        if (kSum) {
            sums = _mm256_add_epi64(sums, mix_avx2(_mm256_add_epi64(word, index)));
            index = _mm256_add_epi64(index, step);
        }
    }
    uint64_t each[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(each), sums);
    for (const uint64_t one : each) sum += one;
    return sum + words_of(run, at, run.size);
}

template <uint64_t (*loop)(const Run &)>
void without_sum(const Run &run) {
    loop(run);
}

#endif

}  // namespace

#ifdef KVMIG_X86

Isa best_isa() {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
        return Isa::kAvx512;
    return __builtin_cpu_supports("avx2") ? Isa::kAvx2 : Isa::kPortable;
}

RunKernels run_kernels(Isa isa, bool streaming) {
    switch (isa) {
        case Isa::kAvx512:
            if (streaming)
                return {without_sum<avx512<To::kMemory, false>>, avx512<To::kMemory, true>,
                        avx512<To::kNowhere, true>};
            return {cached_copy, avx512<To::kCache, true>, avx512<To::kNowhere, true>};
        case Isa::kAvx2:
            if (streaming)
                return {without_sum<avx2<To::kMemory, false>>, avx2<To::kMemory, true>,
                        avx2<To::kNowhere, true>};
            return {cached_copy, avx2<To::kCache, true>, avx2<To::kNowhere, true>};
        case Isa::kPortable:
            break;
    }
    return {cached_copy, portable, portable};
}

void fence() { _mm_sfence(); }

#else

Isa best_isa() { return Isa::kPortable; }

RunKernels run_kernels(Isa, bool) { return {cached_copy, portable, portable}; }

void fence() {}

#endif

}  // namespace kvmig
