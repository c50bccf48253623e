/* A token's attention over a block of packed entries and the tail, and what packs a prompt; see kernels/native.py.

   A block's parts and its tail are read where they lie. Of routed values the stored pieces of each (row, piece), a bag,
   lie together, entry after entry; the weights of its entries are listed once for all bags that share them. Sums are
   made in squares of query rows and channels that fit registers. Other numbers are turned to floats a few entries at a
   time, in the innermost cache; a key's scale goes into its score and a value's into its weights.

   Legend: R rows of a block, c heads of a row, X = R * c of all blocks, G query rows of a head, d head width, N entries
   of all parts of the longest block, M entries of a part, P pieces of an entry in all heads of the row, S bits of an
   entry, n stored pieces. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef float four __attribute__((vector_size(16)));
typedef float eight __attribute__((vector_size(32)));
typedef float float_at;
typedef float four_at __attribute__((vector_size(16), aligned(4), may_alias));
typedef float eight_at __attribute__((vector_size(32), aligned(4), may_alias));
#define AT(vector, address) (*(vector##_at *)(address)) /* a memcpy of many would go through memory */

struct part {
    const void *keys, *values;         /* [heads, apart] with [M, d] in front; of routed values [n, w] */
    const float *key_scales, *value_scales; /* [heads, M]; null where numbers are floats */
    const uint8_t *bits;               /* [R, S, bytes]; null where values are whole, or all entries are alike */
    const int32_t *piece_bit, *starts; /* [P], [R * P]; null where values are whole */
    int64_t entries, apart, stored, pieces, flags, bytes;
    int64_t of_cache;                  /* heads are those of the cache, not of the block: the tail */
    int64_t channel_bits;              /* 32: floats; 16: bfloat16; 8: int8; 4: codes plus 8, the low half of a byte first */
};

struct block {
    const struct part *parts;
    const int64_t *rows; /* of the cache, [R]; null: all, in order */
    int64_t num_parts, num_rows, heads, columns, width, entries;
    int64_t first, before; /* head of the queries with which its cache begins; X of the blocks before it */
    struct part tail;      /* comes after the parts */
};

#define CHUNK 64    /* whole values that stay in the innermost cache while their channels are summed */
#define STRETCH 256 /* entries, in sixteens, whose weights are listed at once */
#define ROWS 4      /* query rows of a square, at most */
#define ROOM (STRETCH + 16)
#define READ 8192   /* codes that are turned to floats at once; no head is wider than a sixteenth of them */

static int64_t cache_head(const struct block *b, int64_t head)
{
    return b->rows ? b->rows[head / b->heads] * b->heads + head % b->heads : head;
}

/* The block of one of the heads of all, X. */
static const struct block *block_of(const struct block *b, int64_t head)
{
    while (head >= b->before + b->num_rows * b->heads)
        b++;
    return b;
}

/* A block's parts in their order, then its tail, then null. */
static const struct part *part_of(const struct block *b, int64_t number)
{
    return number < b->num_parts ? b->parts + number : number == b->num_parts ? &b->tail : 0;
}

/* Channels of a part's keys or values as floats: where they lie, or in the room. */
static inline const float *as_floats(const struct part *p, const void *stored, int64_t first, int64_t count, float *room)
{
    if (p->channel_bits == 32)
        return (const float *)stored + first;
    if (p->channel_bits == 16) {
        const uint16_t *halves = (const uint16_t *)stored + first;
        for (int64_t k = 0; k < count; k++) {
            uint32_t bits = (uint32_t)halves[k] << 16;
            memcpy(room + k, &bits, sizeof bits);
        }
    } else if (p->channel_bits == 8) {
        const int8_t *codes = (const int8_t *)stored + first;
        for (int64_t k = 0; k < count; k++)
            room[k] = codes[k];
    } else {
        const uint8_t *codes = (const uint8_t *)stored + first / 2;
        for (int64_t k = 0; k < count / 2; k++)
            room[2 * k] = (codes[k] & 15) - 8, room[2 * k + 1] = (codes[k] >> 4) - 8;
    }
    return room;
}

#ifdef __clang__
#define SPREAD(weights, i, j) __builtin_shufflevector(weights, weights, i, i, i, i, j, j, j, j)
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t four_places __attribute__((vector_size(16)));
typedef int32_t eight_places __attribute__((vector_size(32)));
#define SPREAD(weights, i, j) __builtin_shuffle(weights, (eight_places){i, i, i, i, j, j, j, j})
#define MIX(a, b, ...) __builtin_shuffle(a, b, (four_places){__VA_ARGS__})
#endif

static inline four halves(eight sums)
{
    return (four){sums[0], sums[1], sums[2], sums[3]} + (four){sums[4], sums[5], sums[6], sums[7]};
}

/* Of two vectors the sums of lanes 0 and 2, then of lanes 1 and 3. */
static inline four crossed(four a, four b)
{
    return MIX(a, b, 0, 4, 1, 5) + MIX(a, b, 2, 6, 3, 7);
}

#if defined __FMA__ && defined __AVX2__
#define PLUS(sum, a, b) (eight) _mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(sum))
#else
#define PLUS(sum, a, b) (sum) + (a) * (b)
#endif

/* Products of a key with several query rows, which read it once. */
static inline __attribute__((always_inline)) void
dots(const int queries, const float *key, const float *query, int64_t width, float scale, float *out, int64_t apart)
{
    eight sums[4] = {};
    int64_t c = 0;
    for (; c + 8 <= width; c += 8)
        for (int q = 0; q < queries; q++)
            sums[q] = queries > 1 ? PLUS(sums[q], AT(eight, key + c), AT(eight, query + q * width + c))
                                  : sums[q] + AT(eight, key + c) * AT(eight, query + c);
    for (int q = 0; q < queries; q++) {
        four low = halves(sums[q]);
        float total = (low[0] + low[2]) + (low[1] + low[3]);
        for (int64_t left = c; left < width; left++)
            total += key[left] * query[q * width + left];
        out[q * apart] = scale * total;
    }
}

/* Of four keys whose channels fill vectors, summed in the same order. */
static inline __attribute__((always_inline)) void
four_dots(const int queries, const float *keys, const float *query, int64_t width, four scale, float *out, int64_t apart)
{
    eight sums[3][4] = {};
    for (int64_t c = 0; c < width; c += 8)
        for (int k = 0; k < 4; k++)
            for (int q = 0; q < queries; q++)
                sums[q][k] = PLUS(sums[q][k], AT(eight, keys + k * width + c), AT(eight, query + q * width + c));
    for (int q = 0; q < queries; q++) {
        four a = crossed(halves(sums[q][0]), halves(sums[q][1])), b = crossed(halves(sums[q][2]), halves(sums[q][3]));
        AT(four, out + q * apart) = scale * (MIX(a, b, 0, 1, 4, 5) + MIX(a, b, 2, 3, 6, 7));
    }
}

static void key_scores(const struct block *b, const float *key, const float *query, float scale, float *out)
{
    int64_t width = b->width, apart = b->entries;
    for (int64_t left = b->columns; left > 0; left -= 4, query += 4 * width, out += 4 * apart)
        left > 3    ? dots(4, key, query, width, scale, out, apart)
        : left == 3 ? dots(3, key, query, width, scale, out, apart)
        : left == 2 ? dots(2, key, query, width, scale, out, apart)
                    : dots(1, key, query, width, scale, out, apart);
}

/* Scores of four keys; a query row that is alone in its four reads them one by one. */
static void four_scores(const struct block *b, const float *keys, const float *query, const float *scales, float *out)
{
    int64_t width = b->width, apart = b->entries, left = b->columns - (b->columns % 4 == 1);
    for (int64_t rows; left; left -= rows, query += rows * width, out += rows * apart) {
        rows = left == 2 || left == 4 ? 2 : 3;
        rows == 3 ? four_dots(3, keys, query, width, AT(four, scales), out, apart)
                  : four_dots(2, keys, query, width, AT(four, scales), out, apart);
    }
    for (int k = 0; k < 4 && b->columns % 4 == 1; k++)
        dots(1, keys + k * width, query, width, scales[k], out + k, apart);
}

/* queries: [heads of all caches, G, d]; scores: [X, G, N], of which a shorter block leaves the end as it is. */
void block_scores(const struct block *blocks, int64_t heads, const float *queries, float scale, int64_t threads,
                  float *scores)
{
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t unit = 0; unit < heads * threads; unit++) {
        const struct block *b = block_of(blocks, unit / threads);
        int64_t head = unit / threads - b->before, share = unit % threads, start = 0, of_cache = cache_head(b, head);
        const float *query = queries + (b->first + of_cache) * b->columns * b->width;
        const struct part *p;
        for (int64_t number = 0; (p = part_of(b, number)); number++, start += p->entries) {
            int64_t of_part = p->of_cache ? of_cache : head, last = p->entries * (share + 1) / threads, next;
            for (int64_t i = p->entries * share / threads; i < last; i = next) {
                next = last - i < READ / 4 / b->width ? last : i + READ / 4 / b->width;
                float room[READ];
                int64_t first = of_part * p->apart + i * b->width;
                const float *keys = as_floats(p, p->keys, first, (next - i) * b->width, room);
                float *out = scores + unit / threads * b->columns * b->entries + start;
                for (int64_t k = i, done; k < next; k += done, keys += done * b->width) {
                    float own[4] = {scale, scale, scale, scale};
                    done = next - k < 4 || b->width % 8 ? 1 : 4;
                    for (int64_t each = 0; p->key_scales && each < done; each++)
                        own[each] = scale * p->key_scales[of_part * p->entries + k + each];
                    if (done == 4)
                        four_scores(b, keys, query, own, out + k);
                    else
                        key_scores(b, keys, query, *own, out + k);
                }
            }
        }
    }
}

struct bag {
    const float *vectors, *weights; /* [count, apart], [query rows, stride] */
    int64_t count, apart, stride;
};

/* Sums of a square of query rows and channels. Small squares make two of each, because an addition waits for the one
   before. */
#define SQUARE(name, vector, queries, blocks, ways)                                                                 \
    static void name(struct bag b, float *sums, int64_t width)                                                      \
    {                                                                                                               \
        vector own[ways][queries][blocks] = {};                                                                     \
        const int lanes = sizeof(vector) / 4;                                                                       \
        for (int64_t i = 0; i < b.count; i += ways)                                                                 \
            for (int way = 0; way < ways && i + way < b.count; way++) {                                             \
                const float *weight = b.weights + i + way, *from = b.vectors + (i + way) * b.apart;                 \
                for (int k = 0; k < blocks; k++)                                                                    \
                    for (int q = 0; q < queries; q++)                                                               \
                        own[way][q][k] += weight[q * b.stride] * AT(vector, from + k * lanes);                \
            }                                                                                                       \
        for (int q = 0; q < queries; q++)                                                                           \
            for (int k = 0; k < blocks; k++)                                                                        \
                for (int way = 0; way < ways; way++)                                                                \
                    AT(vector, sums + q * width + k * lanes) += own[way][q][k];                                     \
    }

SQUARE(one_by_one, float, 1, 1, 2)
SQUARE(one_by_four, four, 1, 1, 2)
SQUARE(two_by_four, four, 2, 1, 2)
SQUARE(three_by_four, four, 3, 1, 2)
SQUARE(four_by_four, four, 4, 1, 2)
SQUARE(one_by_eight, eight, 1, 1, 2)
SQUARE(two_by_eight, eight, 2, 1, 2)
SQUARE(three_by_eight, eight, 3, 1, 2)
SQUARE(four_by_eight, eight, 4, 1, 2)
SQUARE(one_by_half, eight, 1, 8, 1)
SQUARE(one_by_most, eight, 1, 16, 1)
SQUARE(two_by_most, eight, 2, 4, 1)
SQUARE(three_by_most, eight, 3, 3, 1)
SQUARE(four_by_most, eight, 4, 2, 1)

typedef void (*square)(struct bag, float *, int64_t);
static const square BY_FOUR[] = {one_by_four, two_by_four, three_by_four, four_by_four};
static const square BY_EIGHT[] = {one_by_eight, two_by_eight, three_by_eight, four_by_eight};
static const square BY_HALF[] = {one_by_half, two_by_eight, three_by_eight, four_by_eight};
static const square BY_MOST[] = {one_by_most, two_by_most, three_by_most, four_by_most};
static const int64_t HALF[] = {64, 8, 8, 8}, MOST[] = {128, 32, 24, 16}; /* channels of these */

/* Pieces of four channels lie together: a vector holds those of two entries. */
#define PAIRS(name, rest, queries)                                                                                  \
    static void name(struct bag b, float *sums, int64_t width)                                                      \
    {                                                                                                               \
        eight own[queries][2] = {};                                                                                 \
        for (; b.count >= 8; b.count -= 8, b.vectors += 32, b.weights += 8)                                         \
            for (int q = 0; q < queries; q++) {                                                                     \
                eight weight = AT(eight, b.weights + q * b.stride);                                           \
                own[q][0] += SPREAD(weight, 0, 1) * AT(eight, b.vectors);                                     \
                own[q][1] += SPREAD(weight, 2, 3) * AT(eight, b.vectors + 8);                                 \
                own[q][0] += SPREAD(weight, 4, 5) * AT(eight, b.vectors + 16);                                \
                own[q][1] += SPREAD(weight, 6, 7) * AT(eight, b.vectors + 24);                                \
            }                                                                                                       \
        rest(b, sums, width);                                                                                       \
        for (int q = 0; q < queries; q++)                                                                           \
            AT(four, sums + q * width) += halves(own[q][0] + own[q][1]);                                            \
    }

PAIRS(one_by_pairs, one_by_four, 1)
PAIRS(two_by_pairs, two_by_four, 2)
PAIRS(three_by_pairs, three_by_four, 3)
PAIRS(four_by_pairs, four_by_four, 4)
static const square BY_PAIRS[] = {one_by_pairs, two_by_pairs, three_by_pairs, four_by_pairs};

/* Adds a bag's sums of up to four query rows. */
static void add_bag(struct bag b, int64_t channels, int64_t queries, float *sums, int64_t width)
{
    int64_t whole = channels / 4 * 4, most = MOST[queries - 1], half = HALF[queries - 1];
    if (channels == 4 && b.apart == 4) {
        BY_PAIRS[queries - 1](b, sums, width);
        return;
    }
    for (int64_t k = 0, step; k < whole; k += step) {
        struct bag own = {b.vectors + k, b.weights, b.count, b.apart, b.stride};
        step = whole - k >= most ? most : whole - k >= half ? half : whole - k >= 8 ? 8 : 4;
        const square *by = step == most ? BY_MOST : step == half ? BY_HALF : step == 8 ? BY_EIGHT : BY_FOUR;
        by[queries - 1](own, sums + k, width);
    }
    for (int64_t q = 0; q < queries; q++)
        for (int64_t k = whole; k < channels; k++) {
            struct bag own = {b.vectors + k, b.weights + q * b.stride, b.count, b.apart, b.stride};
            one_by_one(own, sums + q * width + k, width);
        }
}

/* Adds the whole values of one part to a cut of a head's channels. */
static void add_values(const struct block *b, const struct part *p, int64_t head, int64_t cut, int64_t cuts,
                       const float *weights, float *sums)
{
    int64_t width = b->width, first = width * cut / cuts, own = width * (cut + 1) / cuts - first;
    int64_t start = (p->of_cache ? cache_head(b, head) : head) * p->apart + first, apart = width;
    float room[CHUNK * READ / 16];
    for (int64_t i = 0; i < p->entries; i += CHUNK) {
        int64_t count = p->entries - i < CHUNK ? p->entries - i : CHUNK;
        const float *values = as_floats(p, p->values, start + i * width, own, room);
        for (int64_t k = 1; values == room && k < count; k++)
            as_floats(p, p->values, start + (i + k) * width, own, room + k * (apart = own));
        for (int64_t q = 0; q < b->columns; q += ROWS) {
            int64_t queries = b->columns - q < ROWS ? b->columns - q : ROWS;
            struct bag some = {values, weights + q * b->entries + i, count, apart, b->entries};
            add_bag(some, own, queries, sums + q * width + first, width);
        }
    }
}

#if defined __AVX2__ && !defined __AVX512F__
static uint8_t PLACES[256][8]; /* of a byte's set bits, ascending; zeros fill them */
__attribute__((constructor)) static void fill_places(void)
{
    for (int byte = 0; byte < 256; byte++)
        for (int left = byte, k = 0; left; left &= left - 1)
            PLACES[byte][k++] = (uint8_t)__builtin_ctz(left);
}
#endif

/* Lists the weights of entries whose bits are set, of up to four query rows; returns how many there are. */
static int64_t list_bits(const uint8_t *bits, int64_t entries, const float *weights, int64_t stride, int64_t queries,
                         float (*own)[ROOM])
{
    int64_t count = 0, i = 0;
#ifdef __AVX512F__
    for (; i < entries; i += 16) {
        __mmask16 held = (__mmask16)(bits[i / 8] | (entries - i > 8 ? bits[i / 8 + 1] << 8 : 0));
        for (int64_t q = 0; q < queries; q++) {
            __m512 read = _mm512_maskz_loadu_ps(held, weights + q * stride + i);
            _mm512_storeu_ps(own[q] + count, _mm512_maskz_compress_ps(held, read));
        }
        count += __builtin_popcount(held);
    }
#else
#ifdef __AVX2__
    for (; i + 8 <= entries; count += __builtin_popcount(bits[i / 8]), i += 8) {
        __m256i places = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)PLACES[bits[i / 8]]));
        for (int64_t q = 0; q < queries; q++) {
            __m256 read = _mm256_loadu_ps(weights + q * stride + i);
            _mm256_storeu_ps(own[q] + count, _mm256_permutevar8x32_ps(read, places));
        }
    }
#endif
    for (; i < entries; i += 8)
        for (unsigned left = bits[i / 8]; left; left &= left - 1, count++)
            for (int64_t q = 0; q < queries; q++)
                own[q][count] = weights[q * stride + i + __builtin_ctz(left)];
#endif
    return count;
}

/* Adds the stored pieces of one part to a cut of a head's pieces, for up to four query rows from the q-th. */
static void add_pieces(const struct block *b, const struct part *p, int64_t head, int64_t cut, int64_t cuts, int64_t q,
                       const float *weights, float *sums)
{
    int64_t per_head = p->pieces / b->heads, channels = b->width / per_head, bags = b->num_rows * p->pieces;
    int64_t queries = b->columns - q < ROWS ? b->columns - q : ROWS, end = per_head * (cut + 1) / cuts, next;
    int64_t stretch = STRETCH * channels <= READ ? STRETCH : READ / channels / 16 * 16;
    const int32_t *starts = p->starts + head * per_head, *bit = p->piece_bit + head % b->heads * per_head;
    float own[ROWS][ROOM], room[READ];
    for (int64_t i = per_head * cut / cuts; i < end; i = next) {
        int64_t last = head * per_head + i + 1 < bags ? starts[i + 1] : p->stored, done = 0;
        for (next = i + 1; p->bits && next < end && bit[next] == bit[i];)
            next++; /* bags that share their entries */
        const uint8_t *bits = p->bits ? p->bits + (head / b->heads * p->flags + bit[i]) * p->bytes : 0;
        for (int64_t from = 0, count; from < (p->bits ? p->entries : last - starts[i]); from += stretch) {
            if (p->bits) {
                int64_t entries = p->entries - from < stretch ? p->entries - from : stretch;
                count = list_bits(bits + from / 8, entries, weights + from, b->entries, queries, own);
            } else {
                count = last - starts[i] - from < stretch ? last - starts[i] - from : stretch;
                for (int64_t row = 0; row < queries; row++)
                    memcpy(own[row], weights + row * b->entries + from, count * sizeof **own);
            }
            for (int64_t k = i; k < next; k++) {
                const float *pieces = as_floats(p, p->values, (starts[k] + done) * channels, count * channels, room);
                struct bag some = {pieces, own[0], count, channels, ROOM};
                add_bag(some, channels, queries, sums + q * b->width + k * channels, b->width);
            }
            done += count;
        }
    }
}

/* Multiplies weights by the scales of the values that they are for. */
static void scale_weights(const struct block *b, int64_t head, float *weights)
{
    for (const struct part *p = b->parts; p < b->parts + b->num_parts; weights += p++->entries)
        for (int64_t q = 0; p->value_scales && q < b->columns; q++)
            for (int64_t i = 0; i < p->entries; i++)
                weights[q * b->entries + i] *= p->value_scales[head * p->entries + i];
}

/* weights: [X, G, N], which scales are multiplied into; sums: [heads of all caches, G, d], zeros; cuts: of a head's
   channels, which threads share. */
void block_sums(const struct block *blocks, int64_t heads, float *weights, int64_t cuts, int64_t threads, float *sums)
{
    int64_t apart = blocks->columns * blocks->entries;
    if (cuts > 1) /* else each head has its own in its turn */
        for (int64_t head = 0; head < heads; head++)
            scale_weights(block_of(blocks, head), head - block_of(blocks, head)->before, weights + head * apart);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t unit = 0; unit < heads * cuts; unit++) {
        const struct block *b = block_of(blocks, unit / cuts);
        int64_t head = unit / cuts - b->before, cut = unit % cuts;
        float *own = weights + unit / cuts * apart;
        float *to = sums + (b->first + cache_head(b, head)) * b->columns * b->width;
        if (cuts == 1)
            scale_weights(b, head, own);
        const struct part *p;
        for (int64_t number = 0; (p = part_of(b, number)); number++, own += p->entries)
            if (!p->starts)
                add_values(b, p, head, cut, cuts, own, to);
            else
                for (int64_t q = 0; q < b->columns; q += ROWS)
                    add_pieces(b, p, head, cut, cuts, q, own + q * b->entries, to);
    }
}

/* What the keys of a head receive from rows of its queries, each row's softmax over the keys up to its place. */
struct asked {
    const void *queries, *keys;    /* [G, q, d] and [K, d], rows of channels */
    const int64_t *places;         /* rows that are asked for, ascending */
    const float *weights, *hidden; /* of rows, [q]; added to the scores of keys, [K]; null: 1 and 0 */
    int64_t query_head, query_row, key_row, columns, marked, entries, width, channel_bits, first, largest;
};

#ifdef __AVX512F__
#define BYTES 64
#define ACROSS 4
#else
#define BYTES 32
#define ACROSS 2
#endif
typedef float wide __attribute__((vector_size(BYTES), aligned(4), may_alias));
#define PANEL (ACROSS * BYTES / 4) /* keys of a tile; sixty-four, or a part of that */
#define DOWN 6                     /* rows of a tile */
#define TALL 48                    /* rows whose scores exist at a time, at most; whole tiles */

/* Lays groups of vectors out channel after channel; zeros fill the last group. */
static void turn(const struct part *p, const void *from, const int64_t *places, int64_t count, int64_t apart,
                 int64_t width, int64_t group, float scale, float *to)
{
    float room[READ / 16];
    for (int64_t i = 0; i < (count + group - 1) / group * group; i++) {
        const float *own = i < count ? as_floats(p, from, (places ? places[i] : i) * apart, width, room) : 0;
        for (int64_t c = 0; c < width; c++)
            to[(i / group * width + c) * group + i % group] = own ? scale * own[c] : 0;
    }
}

static void tile_scores(const float *queries, const float *keys, int64_t width, float *scores, int64_t apart)
{
    wide sums[DOWN][ACROSS] = {}, key[ACROSS];
    for (int64_t c = 0; c < width; c++, keys += PANEL, queries += DOWN) {
        for (int k = 0; k < ACROSS; k++)
            key[k] = ((const wide *)keys)[k];
        for (int r = 0; r < DOWN; r++)
            for (int k = 0; k < ACROSS; k++)
                sums[r][k] += key[k] * queries[r];
    }
    for (int r = 0; r < DOWN; r++)
        for (int k = 0; k < ACROSS; k++)
            ((wide *)(scores + r * apart))[k] = sums[r][k];
}

/* Cephes' expf, of numbers up to 0. */
static inline float exponential(float x)
{
    float turns = x * 1.44269504f + 12582912.0f, n = turns - 12582912.0f, y;
    int32_t power, bits;
    x = x - n * 0.693359375f + n * 2.12194440e-4f;
    y = ((x * 1.9875691500e-4f + 1.3981999507e-3f) * x + 8.3334519073e-3f) * x + 4.1665795894e-2f;
    y = ((y * x + 1.6666665459e-1f) * x + 5.0000001201e-1f) * (x * x) + x + 1.0f;
    memcpy(&power, &turns, sizeof power), memcpy(&bits, &y, sizeof bits);
    bits += (uint32_t)power << 23;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* Makes scores the exponentials of what they are less than the largest; returns their sum, 0 where nothing is seen. */
static float soften(float *scores, int64_t count)
{
    float top = -INFINITY, sum = 0;
#pragma omp simd reduction(max : top)
    for (int64_t k = 0; k < count; k++)
        top = scores[k] > top ? scores[k] : top;
    top = top == -INFINITY ? 0 : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < count; k++) {
        float below = scores[k] - top, power = exponential(below);
        sum += scores[k] = below <= -87 ? 0 : power;
    }
    return sum;
}

/* Adds what keys receive from up to TALL rows of a query head; both are turned. */
static void add_received(const struct asked *a, const int64_t *places, int64_t count, const float *keys,
                         const float *queries, float *scores, int64_t apart, float *received)
{
    int64_t end = (a->first + places[count - 1] + PANEL) / PANEL * PANEL;
    for (int64_t k = 0; k < end; k += PANEL)
        for (int64_t r = 0; r < count; r += DOWN)
            tile_scores(queries + r * a->width, keys + k * a->width, a->width, scores + r * apart + k, apart);
    for (int64_t r = 0; r < count; r++) {
        float *own = scores + r * apart, weight = a->weights ? a->weights[places[r]] : 1, sum;
        int64_t seen = a->first + places[r] + 1;
        for (int64_t k = 0; a->hidden && k < seen; k++)
            own[k] += a->hidden[k];
        sum = soften(own, seen);
        weight = sum == 0 ? 0 : weight / sum;
        if (a->largest)
            for (int64_t k = 0; k < seen; k++)
                received[k] = own[k] * weight > received[k] ? own[k] * weight : received[k];
        else
            for (int64_t k = 0; k < seen; k++)
                received[k] += own[k] * weight;
    }
}

/* keys: room for K, rounded up to 64, times d; room: [threads, TALL, rounded K + 16 + d]; received: [threads, G,
   rounded K], zeros. */
void keys_received(const struct asked *a, float scale, int64_t threads, float *keys, float *room, float *received)
{
    int64_t rounded = (a->entries + 63) / 64 * 64, apart = rounded + 16, width = a->width;
    int64_t size = a->channel_bits / 8, most = 131072 / apart / DOWN * DOWN; /* in a core's own cache */
    int64_t tall = most > TALL ? TALL : most < DOWN ? DOWN : most;
    struct part stored = {.channel_bits = a->channel_bits};
    turn(&stored, a->keys, 0, a->entries, a->key_row, width, PANEL, 1, keys);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t share = 0; share < threads; share++) {
        float *scores = room + share * TALL * (apart + width), *turned = scores + TALL * apart;
        for (int64_t head = 0; head < a->columns; head++)
            for (int64_t i = share * tall; i < a->marked; i += threads * tall) {
                int64_t rows = a->marked - i < tall ? a->marked - i : tall;
                const char *asking = (const char *)a->queries + head * a->query_head * size;
                turn(&stored, asking, a->places + i, rows, a->query_row, width, DOWN, scale, turned);
                add_received(a, a->places + i, rows, keys, turned, scores, apart,
                             received + (share * a->columns + head) * rounded);
            }
    }
}

#define LANES (BYTES / 4)

/* To the nearest integer, the even one of two, up to top in size. */
static inline float whole(float x, float top)
{
    x = x > top ? top : x < -top ? -top : x;
    return x + 12582912.0f - 12582912.0f;
}

/* Rounds keys [heads, M, d], some at a time, in units of that one of scales [heads, M, choices] which loses least
   (chosen). Each channel takes up what those before it lost, as feedback [heads, d, d] says; null: nothing. */
void round_keys(const float *keys, const float *scales, const float *feedback, int64_t heads, int64_t entries,
                int64_t width, int64_t choices, float top, int64_t threads, float *codes, float *chosen)
{
    int64_t tiles = (entries + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t tile = 0; tile < heads * tiles; tile++) {
        int64_t at = tile / tiles * entries + tile % tiles * LANES, left = entries - tile % tiles * LANES;
        const float *owed = feedback ? feedback + tile / tiles * width * width : 0;
        float key[READ / 16][LANES], lost[READ / 16][LANES], best[LANES], least[LANES];
        left = left < LANES ? left : LANES;
        memset(key, 0, width * sizeof *key);
        for (int64_t l = 0; l < left; l++)
            for (int64_t c = 0; c < width; c++)
                key[c][l] = keys[(at + l) * width + c];
        for (int64_t choice = 0; choice < choices; choice++) {
            float scale[LANES], sums[LANES] = {};
            for (int64_t l = 0; l < LANES; l++)
                scale[l] = l < left ? scales[(at + l) * choices + choice] : 1;
            for (int64_t c = 0; c < width; c++)
                for (int64_t l = 0; l < LANES; l++) {
                    float error = whole(key[c][l] / scale[l], top) * scale[l] - key[c][l];
                    sums[l] += error * error;
                }
            for (int64_t l = 0; l < LANES; l++) {
                least[l] = choice ? least[l] : INFINITY, best[l] = choice ? best[l] : scale[l];
                if (sums[l] < least[l])
                    least[l] = sums[l], best[l] = scale[l];
            }
        }
        for (int64_t c = 0; c < width; c++) {
            wide due = *(const wide *)key[c], odd = {};
            for (int64_t before = 0; owed && before + 1 < c; before += 2) {
                due -= owed[c * width + before] * *(const wide *)lost[before];
                odd -= owed[c * width + before + 1] * *(const wide *)lost[before + 1];
            }
            if (owed && c % 2)
                due -= owed[c * width + c - 1] * *(const wide *)lost[c - 1];
            due += odd;
            for (int64_t l = 0; l < LANES; l++) {
                float code = whole(due[l] / best[l], top);
                lost[c][l] = code * best[l] - key[c][l];
                if (l < left)
                    codes[(at + l) * width + c] = code;
            }
        }
        memcpy(chosen + at, best, left * sizeof *best);
    }
}
