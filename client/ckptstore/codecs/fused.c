/* The loops of float-split, compiled: each reads and writes every word of a block once. passes.py has the same loops in
 * numpy, and explains what they do; docs/explanation/format.md has the layout. Two more functions read, hash
 * and search a chunk while its bytes are in the cache. The last three go through the tensors of a state. No function
 * allocates memory or checks sizes: fused.py does. The compiler vectorizes the loops, for several generations of
 * processors where it can.
 */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__) && !defined(ANY_PROCESSOR)
#define MAY_HAVE_AVX2
#include <immintrin.h>
#endif

typedef uint16_t u16 __attribute__((aligned(1), may_alias)); /* chunks begin anywhere in a shard */
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef int16_t i16 __attribute__((aligned(1), may_alias));
typedef int32_t i32 __attribute__((aligned(1), may_alias));

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__)
#define LOOP __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define LOOP
#endif
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

enum { TILE = 1024 };  /* words of 32 bits whose upper halves stay in the L1 cache between two loops */
enum { STRETCH = 128 }; /* words that are searched for escapes at once */
enum { GROUP = 4 };    /* lanes of each half in which one escape counts as much as all */
enum { WINDOW = 16 };  /* codes that fit into half a byte */
enum { SAMPLE = 64 };  /* one word in so many is looked at */

/* How 16 bits are divided: _Fields in passes.py. */
struct fields { unsigned shift, rest, outside; };
static const struct fields EXPONENT = {7, 0x807F, 0xF0 << 7}, TOP_BYTE = {8, 0x00FF, 0xF0 << 8};

struct found { /* what a block is like */
    uint32_t most;             /* the largest word, as unsigned number */
    int32_t top;               /* and as signed number */
    uint32_t least, any;       /* the smallest, as unsigned number; whether an exponent is outside of the window */
    uint32_t top_bytes, base, pairs;
    uint32_t equal_low, equal_rest; /* sampled lanes that equal the next one */
};

INLINE uint16_t swapped(uint16_t lane) { return (uint16_t)(lane << 8 | lane >> 8); }

/* Lanes of two halves of a block: 8 bits of each go to `rest`; the others to `codes`, two in a byte if `pairs`. */
INLINE void split_lanes(const u16 *restrict first, const u16 *restrict second, size_t lanes, struct fields in,
                        unsigned base, int pairs, u16 *restrict rest, uint8_t *restrict codes) {
    const uint16_t origin = (uint16_t)(base << in.shift);
    u16 *restrict wide = (u16 *)codes;
    for (size_t i = 0; i < lanes; i++)
        rest[i] = (uint16_t)((first[i] & in.rest) | swapped(second[i] & in.rest));
    if (pairs)
        for (size_t i = 0; i < lanes; i++) {
            uint16_t a = (uint16_t)(first[i] - origin), b = (uint16_t)(second[i] - origin);
            codes[i] = (uint8_t)((a >> in.shift & 0x0F) | (b >> (in.shift - 4) & 0xF0));
        }
    else
        for (size_t i = 0; i < lanes; i++)
            wide[i] = (uint16_t)((first[i] >> in.shift & 0xFF) | (second[i] << (8 - in.shift) & 0xFF00));
}

INLINE void join_lanes(const u16 *restrict rest, const uint8_t *restrict codes, size_t lanes, struct fields in,
                       unsigned base, int pairs, u16 *restrict first, u16 *restrict second) {
    const u16 *restrict wide = (const u16 *)codes;
    const uint16_t field = (uint16_t)(0xFF << in.shift), origin = (uint16_t)(base << in.shift);
    if (pairs)
        for (size_t i = 0; i < lanes; i++) {
            uint16_t both = codes[i], r = rest[i];
            first[i] = (uint16_t)((uint16_t)(((both & 0x0F) << in.shift) + origin) | (r & in.rest));
            second[i] = (uint16_t)((((both >> 4 << in.shift) + origin) & field) | (swapped(r) & in.rest));
        }
    else
        for (size_t i = 0; i < lanes; i++) {
            uint16_t both = wide[i], r = rest[i];
            first[i] = (uint16_t)((both << in.shift & field) | (r & in.rest));
            second[i] = (uint16_t)((both >> (8 - in.shift) & field) | (swapped(r) & in.rest));
        }
}

/* The extremes of a block; base: of the window. */
LOOP static void survey_wide(const u32 *restrict words, size_t count, unsigned base, struct found *found) {
    const uint32_t origin = base << 23, outside = EXPONENT.outside << 16;
    uint32_t most = 0, least = UINT32_MAX, any = 0;
    int32_t top = INT32_MIN;
    for (size_t i = 0; i < count; i++) {
        uint32_t word = words[i];
        most = word > most ? word : most;
        least = word < least ? word : least;
        top = (int32_t)word > top ? (int32_t)word : top;
        any |= (word - origin) & outside;
    }
    found->most = most, found->top = top, found->least = least, found->any = any;
}

LOOP static void survey_narrow(const u16 *restrict words, size_t count, unsigned base, struct found *found) {
    const uint16_t origin = (uint16_t)(base << 7);
    uint16_t most = 0, least = UINT16_MAX, any = 0;
    int16_t top = INT16_MIN;
    for (size_t i = 0; i < count; i++) {
        uint16_t word = words[i];
        most = word > most ? word : most;
        least = word < least ? word : least;
        top = (int16_t)word > top ? (int16_t)word : top;
        any |= (uint16_t)(word - origin) & (uint16_t)EXPONENT.outside;
    }
    found->most = most, found->top = top, found->least = least, found->any = any;
}

LOOP static void split_wide(const u32 *restrict words, size_t count, struct fields in, unsigned base, int pairs,
                            u32 *restrict low, u16 *restrict rest, uint8_t *restrict codes) {
    const size_t half = count / 2, quarter = count / 4;
    uint32_t first[TILE], second[TILE];
    for (size_t at = 0; at < quarter; at += TILE) {
        const size_t lanes = MIN(TILE, quarter - at);
        for (int part = 0; part < 2; part++) {
            const u32 *restrict from = words + at + part * quarter;
            u32 *restrict to = low + at + part * quarter;
            uint32_t *restrict upper = part ? second : first;
            for (size_t i = 0; i < lanes; i++) {
                uint32_t a = from[i], b = from[half + i];
                to[i] = a ^ b << 16;
                upper[i] = a >> 16 | (b & 0xFFFF0000);
            }
        }
        split_lanes((u16 *)first, (u16 *)second, 2 * lanes, in, base, pairs, rest + 2 * at,
                    codes + (pairs ? 2 : 4) * at);
    }
}

LOOP static void split_narrow(const u16 *restrict words, size_t count, struct fields in, unsigned base, int pairs,
                              u16 *restrict rest, uint8_t *restrict codes) {
    split_lanes(words, words + count / 2, count / 2, in, base, pairs, rest, codes);
}

LOOP static void join_wide(u32 *restrict words, size_t count, struct fields in, unsigned base, int pairs,
                           const u32 *restrict low, int mixed, const u16 *restrict rest,
                           const uint8_t *restrict codes) {
    const size_t half = count / 2, quarter = count / 4;
    const uint32_t mask = mixed ? 0xFFFF : 0;
    uint32_t first[TILE], second[TILE];
    for (size_t at = 0; at < quarter; at += TILE) {
        const size_t lanes = MIN(TILE, quarter - at);
        join_lanes(rest + 2 * at, codes + (pairs ? 2 : 4) * at, 2 * lanes, in, base, pairs, (u16 *)first,
                   (u16 *)second);
        for (int part = 0; part < 2; part++) {
            const u32 *restrict from = low + at + part * quarter;
            u32 *restrict to = words + at + part * quarter;
            const uint32_t *restrict upper = part ? second : first;
            for (size_t i = 0; i < lanes; i++) {
                uint32_t both = upper[i], lower = from[i];
                to[i] = both << 16 | (lower & 0xFFFF);
                to[half + i] = (both & 0xFFFF0000) | (lower >> 16 ^ (both & mask));
            }
        }
    }
}

LOOP static void join_narrow(u16 *restrict words, size_t count, struct fields in, unsigned base, int pairs,
                             const u16 *restrict rest, const uint8_t *restrict codes) {
    join_lanes(rest, codes, count / 2, in, base, pairs, words, words + count / 2);
}

/* The 16 bits that are divided of a word, by their place: those of 32-bit words alternate between the halves. */
INLINE uint16_t high_at(const void *words, int wide, size_t count, size_t place) {
    if (!wide)
        return ((const u16 *)words)[place];
    return (uint16_t)(((const u32 *)words)[place / 2 + (place % 2 ? count / 2 : 0)] >> 16);
}

/* Lists the words whose codes are outside of the window; returns their number, or a larger one than `most`. */
INLINE size_t list_outside(const void *words, int wide, size_t count, struct fields in, unsigned base, size_t most,
                           uint32_t *restrict places, uint16_t *restrict values) {
    const uint16_t origin = (uint16_t)(base << in.shift);
    size_t found = 0;
    for (size_t at = 0; at < count && found <= most; at += STRETCH) {
        const size_t number = MIN(STRETCH, count - at);
        unsigned any = 0;
        if (wide) {
            const u32 *restrict first = (const u32 *)words + at / 2, *restrict second = first + count / 2;
            uint32_t all = 0;
            for (size_t i = 0; i < number / 2; i++)
                all |= ((first[i] >> 16) - origin) | ((second[i] >> 16) - origin);
            any = all;
        } else {
            const u16 *restrict from = (const u16 *)words + at;
            uint16_t all = 0;
            for (size_t i = 0; i < number; i++)
                all |= (uint16_t)(from[i] - origin);
            any = all;
        }
        if (any & in.outside)
            for (size_t place = at; place < at + number; place++) {
                const uint16_t high = high_at(words, wide, count, place);
                places[found] = (uint32_t)place, values[found] = high;
                found += ((uint16_t)(high - origin) & in.outside) != 0;
            }
    }
    return found;
}

LOOP static size_t list_wide(const u32 *words, size_t count, struct fields in, unsigned base, size_t most,
                             uint32_t *places, uint16_t *values) {
    return list_outside(words, 1, count, in, base, most, places, values);
}

LOOP static size_t list_narrow(const u16 *words, size_t count, struct fields in, unsigned base, size_t most,
                               uint32_t *places, uint16_t *values) {
    return list_outside(words, 0, count, in, base, most, places, values);
}

/* Lists the escapes; returns their number, or -1 if they are more than one word in `limit`. They count in groups: four
 * lanes of the block's first half and those of its second. */
static long list_escapes(const void *words, int wide, size_t count, struct fields in, unsigned base, size_t limit,
                         uint32_t *places, uint16_t *values) {
    const size_t half = count / 2, most = 2 * GROUP * (count / limit);
    const size_t found = wide ? list_wide(words, count, in, base, most, places, values)
                              : list_narrow(words, count, in, base, most, places, values);
    if (found > most)
        return -1;
    size_t first = 0, second = 0, groups = 0;
    while (second < found && places[second] < half)
        second++;
    for (const size_t middle = second; first < middle || second < found; groups++) {
        const size_t a = first < middle ? places[first] / GROUP : count;
        const size_t b = second < found ? (places[second] - half) / GROUP : count, group = MIN(a, b);
        while (first < middle && places[first] / GROUP == group)
            first++;
        while (second < found && (places[second] - half) / GROUP == group)
            second++;
    }
    return groups * limit > count ? -1 : (long)found;
}

/* The begin of the window that contains most codes of a sample. */
static unsigned densest(const void *words, int wide, size_t count, struct fields in) {
    uint32_t seen[256] = {0}, inside = 0, most;
    unsigned best = 0;
    for (size_t place = 0; place < count; place += SAMPLE)
        seen[high_at(words, wide, count, place) >> in.shift & 0xFF]++;
    for (unsigned code = 0; code < WINDOW; code++)
        inside += seen[code];
    most = inside;
    for (unsigned begin = 1; begin + WINDOW <= 256; begin++) {
        inside += seen[begin + WINDOW - 1] - seen[begin - 1];
        if (inside > most)
            most = inside, best = begin;
    }
    return best;
}

/* How many of a sample of lanes equal the next: of the lower halves in pairs, and of a plane. */
static uint32_t equal_low(const u32 *words, size_t half) {
    uint32_t equal = 0;
    for (size_t i = 0; i + 1 < half; i += SAMPLE)
        equal += (((words[i] ^ words[i + 1]) | (words[half + i] ^ words[half + i + 1])) & 0xFFFF) == 0;
    return equal;
}

static uint32_t equal_lanes(const u16 *lanes, size_t count) {
    uint32_t equal = 0;
    for (size_t i = 0; i + 1 < count; i += SAMPLE)
        equal += lanes[i] == lanes[i + 1];
    return equal;
}

/* The extremes of a block that is not split. */
static void survey(const void *words, int wide, size_t count, struct found *found) {
    if (wide)
        survey_wide(words, count, 0, found);
    else
        survey_narrow(words, count, 0, found);
}

/* Split a block; returns the number of escapes. base: that of the block before. limits: one word in so many may be
 * outside of its window, or else of the block's own. */
long ckpt_split(const void *words, int wide, size_t count, int half_precision, unsigned base, const size_t limits[2],
                void *low, void *rest, uint8_t *codes, uint32_t *places, uint16_t *values, struct found *found) {
    if (wide)
        survey_wide(words, count, base, found);
    else
        survey_narrow(words, count, base, found);
    const unsigned below = wide ? 16 : 0, highest = found->most >> below;
    const int top_bytes = half_precision || highest < 0x8000;
    const struct fields in = top_bytes ? TOP_BYTE : EXPONENT;
    int any = found->any != 0;
    if (top_bytes)
        any = found->least >> below >> in.shift < base || highest >> in.shift >= base + WINDOW;
    long escapes = 0;
    if (!half_precision && any) {
        escapes = list_escapes(words, wide, count, in, base, limits[0], places, values);
        if (escapes < 0) {
            base = densest(words, wide, count, in);
            escapes = list_escapes(words, wide, count, in, base, limits[1], places, values);
        }
    }
    const int pairs = !half_precision && escapes >= 0;
    if (wide)
        split_wide(words, count, in, base, pairs, low, rest, codes);
    else
        split_narrow(words, count, in, base, pairs, rest, codes);
    for (long i = 0; i < escapes; i++)
        codes[places[i] % (count / 2)] &= places[i] < count / 2 ? 0xF0 : 0x0F;
    found->top_bytes = top_bytes, found->base = base, found->pairs = pairs;
    found->equal_low = wide ? equal_low(words, count / 2) : 0, found->equal_rest = equal_lanes(rest, count / 2);
    return pairs ? escapes : 0;
}

/* Join a block. Returns 0, or -1 if an escape is outside of the block. */
int ckpt_join(void *words, int wide, size_t count, int top_bytes, unsigned base, int pairs, const void *low, int mixed,
              const void *rest, const uint8_t *codes, const u32 *places, const u16 *values, size_t escapes) {
    const struct fields in = top_bytes ? TOP_BYTE : EXPONENT;
    const size_t half = count / 2;
    if (wide)
        join_wide(words, count, in, base, pairs, low, mixed, rest, codes);
    else
        join_narrow(words, count, in, base, pairs, rest, codes);
    for (size_t i = 0; i < escapes; i++) {
        size_t place = places[i];
        uint32_t value = values[i];
        if (place >= count)
            return -1;
        if (!wide) {
            ((u16 *)words)[place] = (uint16_t)value;
            continue;
        }
        u32 *word = (u32 *)words + place / 2 + (place % 2 ? half : 0);
        if (mixed && place % 2 == 0)
            word[half] ^= *word >> 16 ^ value; /* its lower half was mixed with this one */
        *word = value << 16 | (*word & 0xFFFF);
    }
    return 0;
}

/* XXH3 of 128 bits, for more than 240 bytes in one place: doc/xxhash_spec.md of https://github.com/Cyan4973/xxHash. A
 * block is 16 stripes of 64 bytes, each with the secret from another word on. With AVX2 the words that belong to the
 * neighbouring lanes are summed separately, so that no lane needs another one within a block. */
enum { STRIPE = 64, STRIPES = 16, HASHED = STRIPE * STRIPES, HASHED_LEAST = 241, READ_AT_ONCE = 1 << 18 };

static const uint64_t PRIME32[] = {0, 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
static const uint64_t PRIME64[] = {0, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                                   0x27D4EB2F165667C5};
static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

struct hash {
    uint64_t lanes[8];
    size_t blocks; /* already added */
};

INLINE uint64_t load(const uint8_t *from) {
    uint64_t word;
    __builtin_memcpy(&word, from, sizeof word);
    return word;
}

static void add_any(uint64_t *restrict lanes, const uint8_t *restrict data, size_t stripes, const uint8_t *secret) {
    for (size_t at = 0; at < stripes; at++, data += STRIPE)
        for (int i = 0; i < 8; i++) {
            const uint64_t word = load(data + 8 * i), key = word ^ load(secret + 8 * (at + (size_t)i));
            lanes[i ^ 1] += word;
            lanes[i] += (key & UINT32_MAX) * (key >> 32);
        }
}

#ifdef MAY_HAVE_AVX2
__attribute__((target("avx2"))) static void add_avx2(uint64_t *restrict lanes, const uint8_t *restrict data,
                                                     size_t stripes, const uint8_t *secret) {
    for (int half = 0; half < 8; half += 4) {
        __m256i products = _mm256_loadu_si256((const __m256i *)(lanes + half)), words = _mm256_setzero_si256();
        for (size_t at = 0; at < stripes; at++) {
            const __m256i word = _mm256_loadu_si256((const __m256i *)(data + STRIPE * at + 8 * half));
            const __m256i key = _mm256_xor_si256(word, _mm256_loadu_si256((const __m256i *)(secret + 8 * (at + half))));
            products = _mm256_add_epi64(products, _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32)));
            words = _mm256_add_epi64(words, word);
        }
        words = _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
        _mm256_storeu_si256((__m256i *)(lanes + half), _mm256_add_epi64(products, words));
    }
}
#endif

INLINE void add_stripes(uint64_t *lanes, const uint8_t *data, size_t stripes, const uint8_t *secret) {
#ifdef MAY_HAVE_AVX2
    if (__builtin_cpu_supports("avx2")) {
        add_avx2(lanes, data, stripes, secret);
        return;
    }
#endif
    add_any(lanes, data, stripes, secret);
}

static struct hash begin_hash(void) {
    const uint64_t *p = PRIME32, *q = PRIME64;
    return (struct hash){{p[3], q[1], q[2], q[3], q[4], p[2], q[5], p[1]}, 0};
}

/* Add the blocks of `size` bytes at `data` that are not added yet; the last one is for end_hash. */
static void add_blocks(struct hash *hash, const uint8_t *data, size_t size) {
    for (; (hash->blocks + 1) * HASHED < size; hash->blocks++) {
        add_stripes(hash->lanes, data + hash->blocks * HASHED, STRIPES, SECRET);
        for (int i = 0; i < 8; i++) {
            uint64_t lane = hash->lanes[i];
            lane ^= lane >> 47;
            hash->lanes[i] = (lane ^ load(SECRET + sizeof SECRET - STRIPE + 8 * i)) * PRIME32[1];
        }
    }
}

static uint64_t merged(const uint64_t *lanes, const uint8_t *secret, uint64_t all) {
    for (int i = 0; i < 8; i += 2) {
        const __uint128_t product =
            (__uint128_t)(lanes[i] ^ load(secret + 8 * i)) * (lanes[i + 1] ^ load(secret + 8 * i + 8));
        all += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    all ^= all >> 37;
    all *= 0x165667919E3779F9;
    return all ^ all >> 32;
}

/* After add_blocks of everything. digest: big-endian. */
static void end_hash(struct hash *hash, const uint8_t *data, size_t size, uint8_t *digest) {
    const uint8_t *end = SECRET + sizeof SECRET;
    const size_t at = hash->blocks * HASHED;
    add_stripes(hash->lanes, data + at, (size - 1 - at) / STRIPE, SECRET);
    add_stripes(hash->lanes, data + size - STRIPE, 1, end - STRIPE - 7);
    const uint64_t low = merged(hash->lanes, SECRET + 11, size * PRIME64[1]);
    const uint64_t high = merged(hash->lanes, end - STRIPE - 11, ~(size * PRIME64[2]));
    for (int i = 0; i < 8; i++) {
        digest[i] = (uint8_t)(high >> (56 - 8 * i));
        digest[8 + i] = (uint8_t)(low >> (56 - 8 * i));
    }
}

/* The extremes of a chunk of at least HASHED_LEAST bytes, and its digest. count: of words; block: of each block. */
void ckpt_scan(const uint8_t *data, int wide, size_t count, size_t block, struct found *found, uint8_t *digest) {
    const size_t item = wide ? 4 : 2;
    struct hash hash = begin_hash();
    struct found all = {0, INT32_MIN, UINT32_MAX, 0, 0, 0, 0, 0, 0};
    for (size_t at = 0; at < count; at += block) {
        const size_t number = MIN(block, count - at);
        add_blocks(&hash, data, (at + number) * item);
        survey(data + at * item, wide, number, found);
        all.most = found->most > all.most ? found->most : all.most;
        all.top = found->top > all.top ? found->top : all.top;
        all.least = found->least < all.least ? found->least : all.least;
    }
    *found = all;
    end_hash(&hash, data, count * item, digest);
}

/* Read at least HASHED_LEAST bytes from `offset` of a file; returns their number, less at its end, or an error as a
 * negative number. digest: of all of them. */
long ckpt_read(int file, long offset, uint8_t *into, size_t size, uint8_t *digest) {
    struct hash hash = begin_hash();
    size_t done = 0;
    while (done < size) {
        const ssize_t count = pread(file, into + done, MIN(size - done, READ_AT_ONCE), offset + (off_t)done);
        if (count == 0 || (count < 0 && errno != EINTR))
            return count ? -errno : (long)done;
        done += count > 0 ? (size_t)count : 0;
        add_blocks(&hash, into, done);
    }
    end_hash(&hash, into, size, digest);
    return (long)size;
}

/* DLTensor and DLPackExchangeAPI of DLPack 1, https://dmlc.github.io/dlpack/latest/c_api.html */
struct tensor {
    void *data;
    int32_t device_type, device, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
};
struct exchange {
    uint32_t major, minor;
    void *previous, *allocate, *give, *take;
    int (*describe)(void *object, struct tensor *found);
    void *stream;
};

enum { AHEAD = 8, LINES = 4 }; /* tensors that are fetched ahead, and cache lines of each */

/* Words that are equal for tensors of equal address, type, device, shape and strides; first the kinds of their types, a
 * bit for each. Returns their number; 0: another version of DLPack, or more than `most`. The error of an object is
 * raised in Python. The caller holds the GIL. */
size_t ckpt_layouts(const struct exchange *of, void *const *objects, size_t count, int64_t *words, size_t most) {
    size_t used = 1;
    struct tensor one;
    if (of->major != 1 || !of->describe || !most)
        return 0;
    words[0] = 0;
    for (size_t i = 0; i < count; i++) {
        /* A training step leaves none of them in the caches. The third word of torch's objects is the tensor; a fetch
         * ahead from anywhere else does no harm. */
        if (i + 2 * AHEAD < count)
            __builtin_prefetch(objects[i + 2 * AHEAD]);
        if (i + AHEAD < count)
            for (int line = 0; line < LINES; line++)
                __builtin_prefetch(((char *const *)objects[i + AHEAD])[2] + STRIPE * line);
        if (of->describe(objects[i], &one) || used + 3 + 2 * (size_t)one.ndim > most)
            return 0;
        words[0] |= (int64_t)1 << one.code;
        words[used++] = (int64_t)((uintptr_t)one.data + one.offset);
        words[used++] = (int64_t)one.device_type << 32 | (uint32_t)one.device;
        words[used++] = (int64_t)one.ndim << 32 | (int64_t)one.lanes << 16 | one.bits << 8 | one.code;
        for (int at = 0; at < one.ndim; at++) {
            words[used++] = one.shape[at];
            words[used++] = one.strides[at];
        }
    }
    return used;
}

struct move {
    char *to;
    const char *from;
    size_t size;
};

void ckpt_move(const struct move *moves, size_t count) {
    for (; count--; moves++)
        memcpy(moves->to, moves->from, moves->size);
}

/* The numbers of moves whose two sides differ, in all bytes or in the first `least` at `places` places. Returns how
 * many there are. */
size_t ckpt_differ(const struct move *moves, size_t count, size_t places, size_t least, int64_t *found) {
    size_t known = 0;
    for (size_t i = 0; i < count; i++) {
        const struct move one = moves[i];
        const int some = places && one.size > places * least;
        const size_t step = some ? (one.size - least) / (places - 1) : one.size, size = some ? least : one.size;
        int differs = 0;
        for (size_t at = 0; at + size <= one.size && !differs && size; at += step)
            differs = memcmp(one.to + at, one.from + at, size);
        if (differs)
            found[known++] = (int64_t)i;
    }
    return known;
}
