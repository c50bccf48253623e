/* Scores and weighted sums of a token's attention over a block of packed entries and the tail; see kernels/native.py.

   A block's parts and its tail are read where they lie. Of routed values the stored pieces of each (row, piece), a bag,
   lie together, entry after entry; the entries of a bag are listed from the index once for all bags that share them.
   Sums are made in squares of query rows and channels that fit registers.

   Legend: R rows of the block, c heads of a row, X = R * c, G query rows of a head, d head width, N entries of all parts,
   M entries of a part, P pieces of an entry in all heads of the row, S bits of an entry, n stored pieces. */

#include <stdint.h>
#include <string.h>

typedef float four __attribute__((vector_size(16)));
typedef float eight __attribute__((vector_size(32)));

struct part {
    const float *keys, *values;        /* [heads, apart] with [M, d] in front; of routed values [n, w] */
    const int32_t *index;              /* int32 [n]: head of the block * M + entry; null where there are bits */
    const uint8_t *bits;               /* [R, S, bytes]; null where values are whole or there is an index */
    const int32_t *piece_bit, *starts; /* [P], [R * P]; null where values are whole */
    int64_t entries, apart, stored, pieces, flags, bytes;
    int64_t of_cache;                  /* heads are those of the cache, not of the block: the tail */
};

struct block {
    const struct part *parts;
    const int64_t *rows; /* of the cache, [R]; null: all, in order */
    int64_t num_parts, num_rows, heads, columns, width, entries;
};

#define CHUNK 16 /* whole values that stay in the innermost cache while their channels are summed */
static const int32_t COUNTING[CHUNK] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static int64_t cache_head(const struct block *b, int64_t head)
{
    return b->rows ? b->rows[head / b->heads] * b->heads + head % b->heads : head;
}

/* Products of a key with several query rows, which read it once. */
static inline __attribute__((always_inline)) void
dots(const int queries, const float *key, const float *query, int64_t width, float scale, float *out, int64_t apart)
{
    eight sums[4], stored, asked;
    memset(sums, 0, sizeof sums);
    int64_t k = 0;
    for (; k + 8 <= width; k += 8) {
        memcpy(&stored, key + k, sizeof stored);
        for (int q = 0; q < queries; q++) {
            memcpy(&asked, query + q * width + k, sizeof asked);
            sums[q] += stored * asked;
        }
    }
    for (int q = 0; q < queries; q++) {
        four low, high;
        memcpy(&low, &sums[q], sizeof low), memcpy(&high, (char *)&sums[q] + sizeof low, sizeof high);
        low += high;
        float total = (low[0] + low[2]) + (low[1] + low[3]);
        for (int64_t left = k; left < width; left++)
            total += key[left] * query[q * width + left];
        out[q * apart] = scale * total;
    }
}

static void key_scores(const struct block *b, const float *key, const float *query, float scale, float *out)
{
    int64_t q = 0, left, width = b->width, apart = b->entries;
    for (; (left = b->columns - q) >= 4; q += 4)
        dots(4, key, query + q * width, width, scale, out + q * apart, apart);
    query += q * width, out += q * apart;
    if (left == 3)
        dots(3, key, query, width, scale, out, apart);
    else if (left == 2)
        dots(2, key, query, width, scale, out, apart);
    else if (left == 1)
        dots(1, key, query, width, scale, out, apart);
}

/* queries: [heads of the cache, G, d]; scores: [X, G, N]. */
void block_scores(const struct block *b, const float *queries, float scale, int64_t threads, float *scores)
{
    int64_t heads = b->num_rows * b->heads;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t unit = 0; unit < heads * threads; unit++) {
        int64_t head = unit / threads, share = unit % threads, start = 0, of_cache = cache_head(b, head);
        for (const struct part *p = b->parts; p < b->parts + b->num_parts; start += p++->entries) {
            const float *keys = p->keys + (p->of_cache ? of_cache : head) * p->apart;
            const float *query = queries + of_cache * b->columns * b->width;
            float *out = scores + head * b->columns * b->entries + start;
            for (int64_t i = p->entries * share / threads; i < p->entries * (share + 1) / threads; i++)
                key_scores(b, keys + i * b->width, query, scale, out + i);
        }
    }
}

struct bag {
    const float *vectors, *weights; /* [count, apart], [query rows, entries] */
    const int32_t *places;          /* of each vector's entry */
    int64_t count, apart, entries;
};

/* Two sums of each, because an addition waits for the one before. */
#define SQUARE(name, vector, queries, blocks)                                                                       \
    static void name(struct bag b, float *sums, int64_t width)                                                      \
    {                                                                                                               \
        vector even[queries][blocks], odd[queries][blocks], stored;                                                 \
        memset(even, 0, sizeof even), memset(odd, 0, sizeof odd);                                                   \
        for (int64_t i = 0; i < b.count; i += 2) {                                                                  \
            const float *weight = b.weights + b.places[i], *from = b.vectors + i * b.apart;                         \
            for (int k = 0; k < blocks; k++) {                                                                      \
                memcpy(&stored, from + k * sizeof stored / 4, sizeof stored);                                       \
                for (int q = 0; q < queries; q++)                                                                   \
                    even[q][k] += weight[q * b.entries] * stored;                                                   \
            }                                                                                                       \
            if (i + 1 == b.count)                                                                                   \
                break;                                                                                              \
            weight = b.weights + b.places[i + 1], from += b.apart;                                                  \
            for (int k = 0; k < blocks; k++) {                                                                      \
                memcpy(&stored, from + k * sizeof stored / 4, sizeof stored);                                       \
                for (int q = 0; q < queries; q++)                                                                   \
                    odd[q][k] += weight[q * b.entries] * stored;                                                    \
            }                                                                                                       \
        }                                                                                                           \
        for (int q = 0; q < queries; q++)                                                                           \
            for (int k = 0; k < blocks; k++) {                                                                      \
                float *to = sums + q * width + k * sizeof stored / 4;                                               \
                memcpy(&stored, to, sizeof stored);                                                                 \
                stored += even[q][k] + odd[q][k];                                                                   \
                memcpy(to, &stored, sizeof stored);                                                                 \
            }                                                                                                       \
    }

SQUARE(one_by_one, float, 1, 1)
SQUARE(one_by_four, four, 1, 1)
SQUARE(two_by_four, four, 2, 1)
SQUARE(three_by_four, four, 3, 1)
SQUARE(four_by_four, four, 4, 1)
SQUARE(one_by_eight, eight, 1, 1)
SQUARE(two_by_eight, eight, 2, 1)
SQUARE(three_by_eight, eight, 3, 1)
SQUARE(four_by_eight, eight, 4, 1)
SQUARE(one_by_thirty_two, eight, 1, 4)

typedef void (*square)(struct bag, float *, int64_t);
static const square BY_FOUR[] = {one_by_four, two_by_four, three_by_four, four_by_four};
static const square BY_EIGHT[] = {one_by_eight, two_by_eight, three_by_eight, four_by_eight};

static void add_bag(struct bag b, int64_t channels, int64_t columns, float *sums, int64_t width)
{
    int64_t whole = channels / 4 * 4; /* channels that fill vectors */
    for (int64_t q = 0; q < columns; q += 4) {
        int64_t queries = columns - q < 4 ? columns - q : 4;
        for (int64_t k = 0, step; k < whole; k += step) {
            struct bag own = {b.vectors + k, b.weights + q * b.entries, b.places, b.count, b.apart, b.entries};
            step = queries == 1 && whole - k >= 32 ? 32 : whole - k >= 8 ? 8 : 4;
            square add = step == 32 ? one_by_thirty_two : (step == 8 ? BY_EIGHT : BY_FOUR)[queries - 1];
            add(own, sums + q * width + k, width);
        }
    }
    for (int64_t q = 0; q < columns; q++)
        for (int64_t k = whole; k < channels; k++) {
            struct bag own = {b.vectors + k, b.weights + q * b.entries, b.places, b.count, b.apart, b.entries};
            one_by_one(own, sums + q * width + k, width);
        }
}

static void list_places(const struct part *p, int64_t head, int64_t flag, int64_t start, int64_t count, int32_t *places)
{
    if (p->index) {
        for (int64_t i = 0; i < count; i++)
            places[i] = p->index[start + i] - (int32_t)(head * p->entries);
        return;
    }
    for (int64_t byte = 0; byte < p->bytes; byte++)
        for (unsigned left = p->bits[flag * p->bytes + byte]; left; left &= left - 1)
            *places++ = (int32_t)(8 * byte + __builtin_ctz(left));
}

/* Adds the values of one part to a cut of a head's channels; bags that share their entries list them once. */
static void add_part(const struct block *b, const struct part *p, int64_t head, int64_t cut, int64_t cuts,
                     const float *weights, int32_t *places, float *sums)
{
    int64_t width = b->width, of_cache = cache_head(b, head), listed = -1;
    sums += of_cache * b->columns * width;
    if (!p->starts) {
        int64_t first = width * cut / cuts, last = width * (cut + 1) / cuts;
        const float *values = p->values + (p->of_cache ? of_cache : head) * p->apart + first;
        for (int64_t i = 0; i < p->entries; i += CHUNK) {
            int64_t count = p->entries - i < CHUNK ? p->entries - i : CHUNK;
            struct bag some = {values + i * width, weights + i, COUNTING, count, width, b->entries};
            add_bag(some, last - first, b->columns, sums + first, width);
        }
        return;
    }
    int64_t per_head = p->pieces / b->heads, channels = width / per_head, bags = b->num_rows * p->pieces;
    for (int64_t i = per_head * cut / cuts; i < per_head * (cut + 1) / cuts; i++) {
        int64_t bag = head * per_head + i, first = p->starts[bag];
        int64_t count = (bag + 1 < bags ? p->starts[bag + 1] : p->stored) - first;
        int64_t flag = head / b->heads * p->flags + p->piece_bit[bag % p->pieces];
        if (p->index || flag != listed)
            list_places(p, head, flag, first, count, places);
        listed = flag;
        struct bag some = {p->values + first * channels, weights, places, count, channels, b->entries};
        add_bag(some, channels, b->columns, sums + i * channels, width);
    }
}

/* weights: [X, G, N]; rooms: int32 [threads, room], a room for the entries of a part; sums: [heads of the cache, G, d],
   zeros; cuts: of a head's channels, which threads share. */
void block_sums(const struct block *b, const float *weights, int64_t cuts, int64_t threads, int64_t room, int32_t *rooms,
                float *sums)
{
    int64_t units = b->num_rows * b->heads * cuts;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t unit = units * thread / threads; unit < units * (thread + 1) / threads; unit++) {
            const float *own = weights + unit / cuts * b->columns * b->entries;
            for (const struct part *p = b->parts; p < b->parts + b->num_parts; own += p++->entries)
                add_part(b, p, unit / cuts, unit % cuts, cuts, own, rooms + thread * room, sums);
        }
}
