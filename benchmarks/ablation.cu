// One variant of the FlashAttention-3 forward behind a C entry, for benchmarks/ablation.py, which
// compiles this file once for each: -DVARIANT=Complete, NoPingPong, NoOverlap, NoHeldWait or
// NoSpecialisation.
//
// The first four are the kernel of csrc/kernels/fa3_sm90 with a switch of its ForwardConfig off.
// NoSpecialisation has the same consumers and no producer: every thread computes, thread 0 fetches
// as well, and a CTA's warpgroups meet once a block to give the stages back. bfloat16; it takes no
// mask, and S a multiple of kBlockKV.
#include "kernels/fa3_sm90/run.cuh"

namespace jaxflash::fa3_sm90 {

template <int kHeadDim>
struct Complete : ForwardConfig<__nv_bfloat16, kHeadDim, kHeadDim, Features::kPlain> {};
template <int kHeadDim>
struct NoPingPong : Complete<kHeadDim> {
  static constexpr bool kTakesTurns = false;
};
template <int kHeadDim>
struct NoOverlap : Complete<kHeadDim> {
  static constexpr bool kOverlaps = false;
};
template <int kHeadDim>
struct NoHeldWait : Complete<kHeadDim> {
  static constexpr bool kHoldsWait = false;
};
template <int kHeadDim>
struct NoSpecialisation : Complete<kHeadDim> {
  static constexpr bool kTakesTurns = false;
};

// A warpgroup of a CTA without a producer; its lines are Consumer's.
template <class Config>
class Worker : Consumer<Config> {
  using Base = Consumer<Config>;
  using Storage = typename Config::SharedStorage;
  using KVTile = typename Config::KeyTile;  // as large as values
  using QueryTile = typename Config::QueryTile;
  using Base::k_, Base::v_, Base::rows_, Base::shared_, Base::consumer_idx_;

 public:
  __device__ __forceinline__ Worker(const ForwardParams& params, const ForwardMaps& maps,
                                    float scale_log2, int consumer_idx, Storage* shared)
      : Base(params, scale_log2, consumer_idx, shared), maps_(maps) {}

  __device__ __forceinline__ void run_tile(const WorkTile& tile) {
    this->row_begin_ = tile.row_begin + 64 * consumer_idx_;
    this->queries_ = &shared_.q[0][consumer_idx_];
    if (threadIdx.x == 0) load_queries(tile);
    for (int stage = 0; stage < Config::kNumStages; ++stage) {
      load(shared_.k, maps_.k, shared_.k_full, stage, tile, tile.block_end - 1 - stage);
      load(shared_.v, maps_.v, shared_.v_full, stage, tile, tile.block_end - 1 - stage);
    }
    rows_.clear();
    ptx::mbarrier_wait(&shared_.q_full[0][consumer_idx_], 0);
    ptx::mbarrier_wait(&shared_.k_full[0], 0);
    this->issue_scores();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(rows_.scores);
    rows_.take_exact_reference(this->scale_log2_);
    rows_.exponentiate(this->scale_log2_);
    rows_.finish_block();
    give_back_keys(tile, tile.block_end - 1);
#pragma unroll 1
    for (int block = tile.block_end - 2; block >= tile.block_begin; --block) {
      ptx::mbarrier_wait(&shared_.k_full[k_.stage], k_.phase);
      this->issue_scores();
      ptx::mbarrier_wait(&shared_.v_full[v_.stage], v_.phase);
      this->issue_output();
      ptx::wgmma_wait<1>();  // the scores
      ptx::wgmma_pin(rows_.scores);
      rows_.exponentiate(this->scale_log2_);
      ptx::wgmma_hold(rows_.block_sum[0], rows_.block_sum[1], ptx::shared_address(&shared_));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(rows_.output);
      ptx::wgmma_pin(rows_.probabilities);
      const bool has_overflown = rows_.settle();
      rows_.finish_block();
      if (has_overflown) {
        this->recompute_scores(tile, block * Config::kBlockKV);
        rows_.redo(this->scale_log2_);
      }
      give_back_keys(tile, block);
      load(shared_.v, maps_.v, shared_.v_full, v_.stage, tile, block + 1 - Config::kNumStages);
      v_.advance();
    }
    ptx::mbarrier_wait(&shared_.v_full[v_.stage], v_.phase);
    this->issue_output();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(rows_.output);
    ptx::wgmma_pin(rows_.probabilities);
    this->stage_output(tile, &shared_.output_staged[0][consumer_idx_]);
    this->group_sync();  // the output is complete
    if (this->thread_idx_ == 0) {
      send_rows<Config>(maps_.out, *this->queries_, this->row_begin_, tile.head, tile.batch);
      ptx::bulk_wait<0>();
    }
  }

 private:
  __device__ __forceinline__ void load_queries(const WorkTile& tile) const {
    for (int consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
      uint64_t* full = &shared_.q_full[0][consumer];
      ptx::mbarrier_arrive_expect(full, QueryTile::kBytes);
      for (int slab = 0; slab < QueryTile::kNumSlabs; ++slab) {
        ptx::tma_load(shared_.q[0][consumer].slabs[slab], &maps_.q, full, 64 * slab,
                      tile.row_begin + 64 * consumer, tile.head, tile.batch);
      }
    }
  }

  // By thread 0, if there is such a block.
  __device__ __forceinline__ void load(KVTile (&tiles)[Config::kNumStages], const CUtensorMap& map,
                                       uint64_t (&full)[Config::kNumStages], int stage,
                                       const WorkTile& tile, int block) const {
    if (threadIdx.x != 0 || block < tile.block_begin) return;
    ptx::mbarrier_arrive_expect(&full[stage], KVTile::kBytes);
    for (int slab = 0; slab < KVTile::kNumSlabs; ++slab) {
      ptx::tma_load(tiles[stage].slabs[slab], &map, &full[stage], 64 * slab,
                    block * Config::kBlockKV, tile.kv_head, tile.batch);
    }
  }

  // All warpgroups are done with a block's keys, and with the values of the block before it.
  __device__ __forceinline__ void give_back_keys(const WorkTile& tile, int block) {
    __syncthreads();
    load(shared_.k, maps_.k, shared_.k_full, k_.stage, tile, block - Config::kNumStages);
    k_.advance();
  }

  const ForwardMaps& maps_;
};

// Grid: tiles of a head, heads, batch entries.
template <class Config>
__global__ void __launch_bounds__(128 * Config::kNumConsumers, 1)
    unspecialised_kernel(const __grid_constant__ ForwardParams params,
                         const __grid_constant__ ForwardMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared_bytes[];
  auto* shared = reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) init_barriers<Config>(shared);
  __syncthreads();
  const AttentionParams& p = params.attention;
  WorkTile tile = {};
  tile.row_begin = blockIdx.x * Config::kBlockQ;
  tile.head = blockIdx.y;
  tile.batch = blockIdx.z;
  tile.kv_head = blockIdx.y / static_cast<int>(p.group_size);
  tile.block_end = static_cast<int>(p.S) / Config::kBlockKV;
  tile.see.query_len = static_cast<int>(p.T);
  tile.see.kv_len = static_cast<int>(p.S);
  const int worker_idx = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  Worker<Config>(params, maps, device::kLog2E * p.softmax_scale, worker_idx, shared).run_tile(tile);
#endif
}

template <int kHeadDim>
cudaError_t run_unspecialised(const ForwardParams& params) {
  using Config = NoSpecialisation<kHeadDim>;
  const AttentionParams& p = params.attention;
  if (p.window_right >= 0 || p.S % Config::kBlockKV != 0) return cudaErrorNotSupported;
  constexpr int kSharedBytes = sizeof(typename Config::SharedStorage);
  ForwardMaps maps;
  cudaError_t error = encode_forward_maps<Config>(params, &maps);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(unspecialised_kernel<Config>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (error != cudaSuccess) return error;
  const dim3 grid((p.T + Config::kBlockQ - 1) / Config::kBlockQ, p.N, p.B);
  unspecialised_kernel<Config><<<grid, 128 * Config::kNumConsumers, kSharedBytes>>>(params, maps);
  return cudaGetLastError();
}

template <int kHeadDim>
cudaError_t run_variant(const ForwardParams& params, int* drawn) {
  if constexpr (std::is_same_v<VARIANT<kHeadDim>, NoSpecialisation<kHeadDim>>) {
    return run_unspecialised<kHeadDim>(params);
  } else {
    return run_forward<VARIANT<kHeadDim>>(params, SequenceInputs{}, drawn, nullptr);
  }
}

}  // namespace jaxflash::fa3_sm90

// Milliseconds of a call, the mean of `calls` on the default stream; negative = minus the CUDA
// error. q, k, v, out: [B, T, N, H] on the device; scratch: 2 B T N floats and one more.
extern "C" float forward_milliseconds(const void* q, const void* k, const void* v, void* out,
                                      float* scratch, int64_t B, int64_t T, int64_t N, int64_t H,
                                      int is_causal, int calls) {
  using namespace jaxflash;
  ForwardParams params = {};
  AttentionParams& p = params.attention;
  p.B = B, p.T = p.S = T, p.N = p.K = N, p.H = p.Hv = H;
  for (int64_t& dim : p.batch_dims) dim = 1;
  p.batch_dims[kMaxBatchDims - 1] = B;
  p.group_size = 1;
  p.q = q, p.k = k, p.v = v;
  p.dtype = DataType::kBFloat16;
  p.softmax_scale = 1.0f / sqrtf(static_cast<float>(H));
  p.window_left = -1;
  p.window_right = is_causal ? 0 : -1;
  params.out = out;
  params.lse = scratch;
  params.lse_low = scratch + B * T * N;
  int* drawn = reinterpret_cast<int*>(scratch + 2 * B * T * N);

  cudaEvent_t begin, end;
  cudaError_t error = cudaEventCreate(&begin);
  if (error == cudaSuccess) error = cudaEventCreate(&end);
  if (error == cudaSuccess) error = cudaEventRecord(begin);
  for (int i = 0; i < calls && error == cudaSuccess; ++i) {
    error = H == 64 ? fa3_sm90::run_variant<64>(params, drawn)
                    : fa3_sm90::run_variant<128>(params, drawn);
  }
  if (error == cudaSuccess) error = cudaEventRecord(end);
  if (error == cudaSuccess) error = cudaEventSynchronize(end);
  float milliseconds = 0.0f;
  if (error == cudaSuccess) error = cudaEventElapsedTime(&milliseconds, begin, end);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return error == cudaSuccess ? milliseconds / calls : -static_cast<float>(error);
}
