// FlashAttention-2 backward (arXiv:2307.08691, Algorithm 2): a repeatable gradient of the bias.
//
// One CTA owns a tile of the bias array, 64 x 64 (kTile), and a share of the walk over
// everything that reads the tile: batch entries, heads, query tiles where the bias has one row, key
// tiles where it has one column. It recomputes S and dP of each pair of tiles, sums dlogit in
// registers in the order of the walk and writes once, so the sums repeat to the bit. A walk is
// split only where the bias has too few tiles to fill a GPU, in a way that depends on the shapes
// alone; the shares are then summed in order by backward_bias_kernel. Calls that ask for
// deterministic gradients run this beside the key/value kernel, which then adds no gradient of the
// bias. Needs what the prepare kernel left in the workspace. No packed sequences, as no bias has
// them.
//
//   copy what changed of q, dout, k, v      ===============
//   S = Q K^T, dP = dout V^T, dlogit                       ==============
//                                          A              B
//
// barrier   protects
// A         the tiles of the step before, and the sums at the end, are read by everybody
// B         the tiles have arrived for everybody
//
// Other CTAs of the multiprocessor fill the waits: there is one stage, so that they fit.
#pragma once

#include "kernels/fa2_sm80/backward_query.cuh"

namespace jaxflash::fa2_sm80 {

constexpr int kMaxBiasTile = 64;  // rows and columns of the bias that a CTA owns, at most

// Shares of a walk are made until there are this many CTAs. Not the size of any GPU, so that all
// sum in the same order.
constexpr int64_t kMinBiasCtas = 512;

// Floats of the shares at most: of all parts of a bias of `elements`.
constexpr int64_t bias_part_floats(int64_t elements) {
  return kMinBiasCtas *
         (elements < kMaxBiasTile * kMaxBiasTile ? elements : kMaxBiasTile * kMaxBiasTile);
}

template <class Stored, int kHeadDim_>
struct BackwardBiasConfig {
  static constexpr int kHeadDim = kHeadDim_;
  // Rows and columns of the bias that a CTA owns, as shared memory allows.
  static constexpr int kTile = sizeof(Stored) * kHeadDim <= 512 ? kMaxBiasTile : kMaxBiasTile / 2;
  static constexpr int kBlockQ = kTile;
  static constexpr int kStepsPerSlot = kBackwardBlockQ / kBlockQ;  // query tiles of a slot
  static constexpr int kBlockKV = 32;                              // keys of a warp
  static constexpr int kQueryWarps = kTile / 16;
  static constexpr int kKeyWarps = kTile / kBlockKV;
  static constexpr int kThreads = 32 * kQueryWarps * kKeyWarps;
  // Registers allow this many, and shared memory.
  static constexpr int kCtasPerSm = sizeof(Stored) * kHeadDim <= 256 ? 2 : 1;
  // Steps of 16 features unrolled in the products.
  static constexpr int kUnroll = sizeof(Stored) == 2 ? kHeadDim / 16 : 2;
  static_assert(kStepsPerSlot * kBlockQ == kBackwardBlockQ, "a slot is whole steps");
  static_assert(kThreads >= kTile, "a thread sums a row or a column of the tile");

  struct Tiles {
    mma::SharedTile<Stored, kBlockQ, kHeadDim> q, dout;
    mma::SharedTile<Stored, kBlockKV, kHeadDim> k[kKeyWarps], v[kKeyWarps];
  };
  using Sums = float[kTile][kTile + 1];  // [rows, columns], padded against bank conflicts
  union SharedStorage {
    Tiles tiles;
    Sums sums;
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= 163 * 1024, "sm_80 gives a CTA 163 KiB");
};

// How the gradient of a bias is cut into CTAs: grid (bias batch entry, head, row tile, column tile,
// part), parts fastest.
struct BiasPlan {
  int row_tiles, column_tiles;  // of one head of the bias
  int query_tiles, key_tiles;   // that are summed into one tile of the bias
  int heads, members;           // the same
  int parts;                    // shares of the walk over all of these
  int64_t part_stride;          // elements between the results of two parts
  void* destination;            // [parts, shape of the bias]
  DataType dtype;               // of destination
};

// part_sums: [bias_part_floats(elements of the bias)].
template <class Config>
BiasPlan plan_bias(const BackwardParams& params, float* part_sums) {
  const AttentionParams& attention = params.attention;
  const BiasGradient& dbias = params.dbias;
  const auto tiles = [](int64_t size) {
    return static_cast<int>((size + Config::kTile - 1) / Config::kTile);
  };
  BiasPlan plan = {};
  plan.row_tiles = tiles(dbias.num_rows);
  plan.column_tiles = tiles(dbias.num_columns);
  plan.query_tiles = dbias.num_rows == 1 ? tiles(attention.T) : 1;
  plan.key_tiles = dbias.num_columns == 1 ? tiles(attention.S) : 1;
  plan.heads = static_cast<int>(dbias.num_heads == 1 ? attention.N : 1);
  plan.members = static_cast<int>(dbias.num_batches == 0 ? 0 : attention.B / dbias.num_batches);
  const int64_t owned = dbias.num_batches * dbias.num_heads * plan.row_tiles * plan.column_tiles;
  const int64_t steps =
      static_cast<int64_t>(plan.query_tiles) * plan.key_tiles * plan.heads * plan.members;
  const int64_t wanted = owned == 0 ? 1 : kMinBiasCtas / owned;
  const int64_t parts = wanted < steps ? wanted : steps;
  plan.parts = static_cast<int>(parts > 1 ? parts : 1);
  plan.part_stride = dbias.num_batches * dbias.num_heads * dbias.num_rows * dbias.num_columns;
  plan.destination = plan.parts == 1 ? dbias.data : part_sums;
  plan.dtype = plan.parts == 1 ? attention.bias.dtype : DataType::kFloat32;
  return plan;
}

// One step of a walk: which queries and keys meet.
struct BiasStep {
  int batch, head, query_tile, key_tile;
};

// The tile of the bias that a CTA owns.
struct BiasTilePlace {
  int batch, head, row_tile, column_tile, part;
};

__device__ __forceinline__ BiasTilePlace locate_bias_tile(const BiasGradient& dbias,
                                                          const BiasPlan& plan) {
  BiasTilePlace place;
  int rest = blockIdx.x;
  place.part = rest % plan.parts;
  rest /= plan.parts;
  place.column_tile = rest % plan.column_tiles;
  rest /= plan.column_tiles;
  place.row_tile = rest % plan.row_tiles;
  rest /= plan.row_tiles;
  place.head = rest % static_cast<int>(dbias.num_heads);
  place.batch = rest / static_cast<int>(dbias.num_heads);
  return place;
}

// The batch entry whose coordinates are those of bias entry `entry` in the dims that the bias has,
// and those of `member` in the dims it is broadcast over.
__device__ __forceinline__ int batch_of_member(const AttentionParams& params, int entry,
                                               int member) {
  int batch = 0, stride = 1;
#pragma unroll
  for (int dim = kMaxBatchDims - 1; dim >= 0; --dim) {
    const int size = static_cast<int>(params.batch_dims[dim]);
    if (size == 1) continue;
    int& source = params.bias.batch_stride[dim] != 0 ? entry : member;
    batch += source % size * stride;
    source /= size;
    stride *= size;
  }
  return batch;
}

// Query tiles fastest, so that keys and values stay where they can.
__device__ __forceinline__ BiasStep step_of_walk(const AttentionParams& params,
                                                 const BiasPlan& plan, const BiasTilePlace& place,
                                                 int64_t index) {
  BiasStep step;
  step.query_tile = place.row_tile + static_cast<int>(index % plan.query_tiles);
  index /= plan.query_tiles;
  step.key_tile = place.column_tile + static_cast<int>(index % plan.key_tiles);
  index /= plan.key_tiles;
  step.head = place.head + static_cast<int>(index % plan.heads);
  step.batch = batch_of_member(params, place.batch, static_cast<int>(index / plan.heads));
  return step;
}

// sums += dlogit of the warp's 16 queries and all keys of a tile, from q.k and dout.v.
template <class Config>
__device__ __forceinline__ void add_dlogits(const AttentionParams& params,
                                            const device::Visibility& see,
                                            const device::DropoutStream& dropout, bool is_partial,
                                            int query, int key, const LaneStatistics& rows,
                                            int lane_idx, const QueryScores<Config>& scores,
                                            const QueryScores<Config>& dout_v,
                                            QueryScores<Config>& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = query + 8 * half + lane_idx / 4;
    const RowLse lse = rows.lse_rows.at(row, rows.lse_log2[half]);
    uint32_t words[4];  // of the next four fragments
#pragma unroll
    for (int j = 0; j < Config::kBlockKV / 8; ++j) {
      if (dropout.threshold > 0 && j % 4 == 0) {
        device::draw_words(dropout, row, key + 8 * j, lane_idx, words);
      }
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const int column = key + 8 * j + lane_idx % 4 * 2 + parity;
        const int e = 2 * half + parity;
        float keep = 1.0f;
        if (dropout.threshold > 0) {
          keep = device::is_kept(dropout, words[j % 4], parity) ? dropout.scale : 0.0f;
        }
        sums.values[0][j][e] +=
            pair_gradient(params, see, is_partial, row, column, keep, lse, rows.delta[half],
                          scores.values[0][j][e], dout_v.values[0][j][e])
                .dlogit;
      }
    }
  }
}

__device__ __forceinline__ void write_float(void* data, DataType dtype, int64_t index,
                                            float value) {
  if (dtype == DataType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else if (dtype == DataType::kBFloat16) {
    static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(data)[index] = __float2half_rn(value);
  }
}

// Sums the rows and the columns of a tile where the bias has only one, in their order, and writes
// the rest.
template <class Config>
__device__ __forceinline__ void store_bias_tile(const BiasGradient& dbias, const BiasPlan& plan,
                                                const BiasTilePlace& place, int warp_row,
                                                int warp_column, int lane_idx,
                                                const QueryScores<Config>& sums,
                                                typename Config::Sums& tile) {
  constexpr int kTile = Config::kTile;
  __syncthreads();  // A
#pragma unroll
  for (int j = 0; j < Config::kBlockKV / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = warp_column + 8 * j + mma::fragment_column(lane_idx, e);
      tile[warp_row + mma::fragment_row(lane_idx, e)][column] = sums.values[0][j][e];
    }
  }
  __syncthreads();  // everybody's sums are written
  const int line = threadIdx.x;
  if (dbias.num_rows == 1) {
    if (line < kTile) {
      for (int row = 1; row < kTile; ++row) tile[0][line] += tile[row][line];
    }
    __syncthreads();  // row 0 holds the sums of all rows
  }
  if (dbias.num_columns == 1) {
    if (line < kTile) {
      for (int column = 1; column < kTile; ++column) tile[line][0] += tile[line][column];
    }
    __syncthreads();  // column 0 holds the sums of all columns
  }
  const int64_t num_rows = dbias.num_rows, num_columns = dbias.num_columns;
  const int64_t plane = place.part * plan.part_stride +
                        (place.batch * dbias.num_heads + place.head) * num_rows * num_columns;
  for (int i = threadIdx.x; i < kTile * kTile; i += Config::kThreads) {
    const int64_t row = place.row_tile * kTile + i / kTile;
    const int64_t column = place.column_tile * kTile + i % kTile;
    if (row >= num_rows || column >= num_columns) continue;
    write_float(plan.destination, plan.dtype, plane + row * num_columns + column,
                tile[i / kTile][i % kTile]);
  }
}

template <class Config, class Element>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    backward_bias_tile_kernel(const __grid_constant__ BackwardParams params,
                              const __grid_constant__ SequenceInputs inputs,
                              const __grid_constant__ BackwardWorkspace workspace,
                              const __grid_constant__ BiasPlan plan) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_memory);
  auto& tiles = shared.tiles;
  const AttentionParams& attention = params.attention;
  const BiasTilePlace owned = locate_bias_tile(params.dbias, plan);
  const int64_t steps =
      static_cast<int64_t>(plan.query_tiles) * plan.key_tiles * plan.heads * plan.members;
  const int64_t end = steps * (owned.part + 1) / plan.parts;
  const int warp_row = threadIdx.x / 32 % Config::kQueryWarps * 16;
  const int key_warp = threadIdx.x / (32 * Config::kQueryWarps);
  const int warp_key = key_warp * Config::kBlockKV;
  int lane_idx = threadIdx.x % 32;
  QueryScores<Config> sums;
  sums.clear();
  BiasStep loaded = {-1, -1, -1, -1};
  for (int64_t index = steps * owned.part / plan.parts; index < end; ++index) {
    lane_idx = ptx::opaque(lane_idx);  // as in the key/value kernel
    const BiasStep step = step_of_walk(attention, plan, owned, index);
    const device::SequenceTile place =
        device::locate_tile<true, Config::kBlockQ>(attention, inputs, step.batch, step.query_tile);
    const device::Visibility see = device::make_visibility(attention, place, step.head);
    const int query = place.row_begin, key = step.key_tile * Config::kTile;
    const device::Box box = {query, query + Config::kBlockQ, key, key + Config::kTile};
    const device::Tile kind =
        device::classify(see, box, device::classify_blocks(see, box), lane_idx);
    if (kind == device::Tile::kHidden) continue;
    const RowStatistics& statistics = workspace.statistics[workspace.index_of(
        attention, step.batch, step.head, step.query_tile / Config::kStepsPerSlot)];
    const int row_in_slot = step.query_tile % Config::kStepsPerSlot * Config::kBlockQ;
    const int kv_head = step.head / static_cast<int>(attention.group_size);
    __syncthreads();  // A
    if (step.batch != loaded.batch || step.head != loaded.head ||
        step.query_tile != loaded.query_tile) {
      load_queries<true, Config::kThreads>(params, see, place, statistics.lse_log2 + row_in_slot,
                                           step.head, query, tiles.q, tiles.dout);
    }
    if (step.batch != loaded.batch || step.key_tile != loaded.key_tile || loaded.head < 0 ||
        kv_head != loaded.head / static_cast<int>(attention.group_size)) {
#pragma unroll
      for (int i = 0; i < Config::kKeyWarps; ++i) {
        load_keys<true, Config::kThreads>(attention, place, kv_head, key + i * Config::kBlockKV,
                                          tiles.k[i], tiles.v[i]);
      }
    }
    loaded = step;
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();  // B
    LaneStatistics rows;
    rows.lse_rows = make_lse_rows(params, place, step.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_in_slot + warp_row + 8 * half + lane_idx / 4;
      rows.lse_log2[half] = statistics.lse_log2[row];
      rows.delta[half] = statistics.delta[row];
    }
    QueryScores<Config> scores, dout_v;
    compute_query_scores<Config, Element>(tiles.q, tiles.k[key_warp], warp_row, lane_idx, scores);
    compute_query_scores<Config, Element>(tiles.dout, tiles.v[key_warp], warp_row, lane_idx,
                                          dout_v);
    add_dlogits<Config>(attention, see, device::make_dropout(attention, place, step.head),
                        kind == device::Tile::kPartial, query + warp_row, key + warp_key, rows,
                        lane_idx, scores, dout_v, sums);
  }
  store_bias_tile<Config>(params.dbias, plan, owned, warp_row, warp_key, lane_idx, sums,
                          shared.sums);
}

}  // namespace jaxflash::fa2_sm80
