// Reshards and packs with odd sizes, each buffer exactly as large as its bytes, so that a
// sanitizer sees any access outside. Ends with 0 when every byte is right.

#include "kvmig.h"

#include <cstdio>
#include <memory>
#include <vector>

namespace {

// Blocks of [tokens, heads, row] bytes, or of [heads, tokens, row].
struct End {
    int64_t heads, tokens, blocks;
    bool head_major;
    std::vector<int64_t> ids;
    std::unique_ptr<unsigned char[]> memory;
    kvmig_grid grid;

    End(int64_t n_heads, int64_t block_tokens, int64_t n, int64_t row, bool major)
        : heads(n_heads), tokens(block_tokens), blocks((n + tokens - 1) / tokens),
          head_major(major), memory(new unsigned char[static_cast<std::size_t>(
                                 blocks * tokens * heads * row)]()) {
        for (int64_t b = 0; b < blocks; ++b) ids.push_back(blocks - 1 - b);
        grid = {memory.get(), tokens * heads * row, major ? row : heads * row,
                major ? tokens * row : row};
    }

    unsigned char &at(int64_t token, int64_t head, int64_t byte) {
        const int64_t block = ids[static_cast<std::size_t>(token / tokens)];
        return memory[static_cast<std::size_t>(block * grid.block_stride +
                                               token % tokens * grid.token_stride +
                                               head * grid.head_stride + byte)];
    }
};

bool resharded(int64_t row, bool from_major, bool to_major, int32_t workers) {
    constexpr int64_t kTokens = 150;
    End src(5, 16, kTokens, row, from_major), dst(3, 7, kTokens, row, to_major);
    for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t h = 0; h < 5; ++h)
            for (int64_t b = 0; b < row; ++b)
                src.at(t, h, b) = static_cast<unsigned char>(t * 31 + h * 7 + b + 1);
    const kvmig_shard from{&src.grid, src.ids.data(), 16, 0}, to{&dst.grid, dst.ids.data(), 7, 2};
    if (kvmig_reshard(&from, &to, 1, 3, kTokens - 3, 2, 3, row, nullptr, workers)) return false;
    for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t h = 0; h < 3; ++h)
            for (int64_t b = 0; b < row; ++b)
                if (dst.at(t, h, b) != (t < 3 ? 0 : src.at(t, h + 2, b))) return false;
    return true;
}

bool packed(int64_t rows, int64_t width, int32_t dtype, int32_t workers) {
    const auto values = static_cast<std::size_t>(rows * width);
    const std::unique_ptr<uint16_t[]> src(new uint16_t[values]), back(new uint16_t[values]);
    const std::unique_ptr<uint8_t[]> codes(new uint8_t[values]);
    const std::unique_ptr<float[]> scales(new float[static_cast<std::size_t>(rows)]);
    // Powers of two come back as they are.
    const uint16_t one = dtype == KVMIG_BF16 ? 0x3f80 : 0x3c00;
    for (std::size_t i = 0; i < values; ++i) src[i] = static_cast<uint16_t>(one | (i % 2 << 15));
    if (kvmig_pack_fp8(src.get(), dtype, rows, width, codes.get(), scales.get(), nullptr, workers))
        return false;
    if (kvmig_unpack_fp8(codes.get(), scales.get(), dtype, rows, width, back.get(), nullptr,
                         workers))
        return false;
    for (int64_t r = 0; r < rows; ++r)
        if (scales[static_cast<std::size_t>(r)] != 1.0f / 448.0f) return false;
    for (std::size_t i = 0; i < values; ++i)
        if (back[i] != src[i]) return false;
    return true;
}

}  // namespace

int main() {
    for (const int64_t row : {1, 3, 16, 200})
        for (const bool from : {false, true})
            for (const bool to : {false, true})
                for (const int32_t workers : {0, 2, 3})
                    if (!resharded(row, from, to, workers)) {
                        std::fprintf(stderr, "a reshard of %d bytes is wrong\n",
                                     static_cast<int>(row));
                        return 1;
                    }
    for (const int64_t width : {1, 7, 64, 577})
        for (const int32_t dtype : {KVMIG_BF16, KVMIG_FP16})
            for (const int32_t workers : {0, 2, 3})
                if (!packed(1001, width, dtype, workers)) {
                    std::fprintf(stderr, "rows of %d values are packed wrong\n",
                                 static_cast<int>(width));
                    return 1;
                }
    return 0;
}
