// Executes instructions: control flow, memory, barriers and warp-wide operations; hands the rest to
// its units.
#pragma once

#include "copies.hpp"
#include "tensor.hpp"
#include "wgmma.hpp"

namespace ptx {

enum class Flow { Next, Jumped, Blocked, Parked, Gone };
// Blocked: run the same instruction again later. Parked: done, but wait before the next one.

class Interpreter {
 public:
  explicit Interpreter(Machine& m) : m_(m) {}

  Flow execute(Warp& w, size_t split, const Insn& i) {
    const u32 present = w.splits[split].mask;
    u32 mask = present;
    if (i.guard >= 0) {
      const u32 p = w.predicates[static_cast<size_t>(i.guard)];
      mask &= i.negate ? ~p : p;
    }
    if (i.op == BRA) return branch(w, split, i, mask);
    if ((i.flags & F_ALIGNED) && !together(w, split, w.live)) return Flow::Blocked;
    if (mask == 0) return Flow::Next;
    if ((i.flags & F_ALIGNED) && mask != w.live)
      throw Fault("protocol", "an .aligned instruction is executed by lanes " + hex(mask) +
                                  " of its warp only");
    if (w.busy_count) settle_registers(m_, w, i);
    if (execute_alu(w, i, mask)) return Flow::Next;
    switch (i.op) {
      case NOP: return Flow::Next;
      case EXIT: return leave(w, split, mask);
      case TRAP: throw Fault("trap", "the kernel executed trap");
      case LD: load(w, i, mask); return Flow::Next;
      case ST: store(w, i, mask); return Flow::Next;
      case ATOM: atomic(w, i, mask); return Flow::Next;
      case CVTA_SHARED:
        each(mask, [&](int l) {
          w.r64(i.a[0])[l] = kSharedWindow | static_cast<u32>(value(w, i.a[1], l));
        });
        return Flow::Next;
      case CVTA_TO_SHARED:
        each(mask, [&](int l) {
          const u64 x = w.r64(i.a[1])[l];
          if (x >> 32 != kSharedWindow >> 32)
            throw Fault("bounds", "cvta.to.shared of " + hex(x) + ", which is no shared address");
          if (m_.program.wide[static_cast<size_t>(i.a[0])])
            w.r64(i.a[0])[l] = x & 0xFFFFFFFF;
          else
            w.r32(i.a[0])[l] = static_cast<u32>(x);
        });
        return Flow::Next;
      case MAPA:
        each(mask, [&](int l) {
          // A rank outside the cluster gives an address that faults when it is used.
          const u32 rank = w.r32(i.a[2])[l] & 0xFF;
          const u64 a = value(w, i.a[1], l);
          put_value(w, i.a[0], l, (a & ~u64{0xFF000000}) | static_cast<u64>(rank) << 24);
        });
        return Flow::Next;
      case GETCTARANK:
        each(mask, [&](int l) { w.r32(i.a[0])[l] = static_cast<u32>(value(w, i.a[1], l)) >> 24; });
        return Flow::Next;
      case SHFL:
      case VOTE:
      case ELECT:
      case REDUX:
      case MATCH:
      case WARPSYNC:
      case ACTIVEMASK: return warp_wide(w, split, i, mask);
      case BARRIER: return named_barrier(w, split, i, mask);
      case CLUSTER_ARRIVE: cluster_arrive(w, i); return Flow::Next;
      case CLUSTER_WAIT: return cluster_wait(w, split);
      case FENCE_ASYNC: {
        // PTX ISA 9.7.13.4: orders generic accesses known here with later ones through the async
        // proxy.
        publish(w);
        w.knows.fenced.join(w.knows.all);
        return Flow::Next;
      }
      case STMATRIX:
      case LDMATRIX: matrix_transfer(w, i, mask); return Flow::Next;
      case MBAR_INIT:
        each(mask, [&](int l) {
          const u32 a = shared_address(w, i.a[0], i.a[1], l);
          mbarrier_init(w, shared_target(m_, w, a, false, "mbarrier.init"), a & kOffsetMask,
                        w.r32(i.a[2])[l]);
        });
        return Flow::Next;
      case MBAR_INVAL:
        each(mask, [&](int l) {
          const u32 a = shared_address(w, i.a[0], i.a[1], l);
          Cta& cta = shared_target(m_, w, a, false, "mbarrier.inval");
          mbarrier_at(cta, a & kOffsetMask, "mbarrier.inval");
          cta.mbarriers.erase(a & kOffsetMask);
          cta.shared->release_barrier(a & kOffsetMask);
        });
        return Flow::Next;
      case MBAR_ARRIVE: arrive(w, i, mask); return Flow::Next;
      case MBAR_TRY: return try_wait(w, split, i, mask);
      case CP_ASYNC:
      case CP_ASYNC_COMMIT:
      case CP_ASYNC_WAIT:
      case CP_ASYNC_MBAR: execute_cp_async(m_, w, i, mask); return Flow::Next;
      case ST_ASYNC: execute_st_async(m_, w, i, mask); return Flow::Next;
      case BULK_G2S:
      case BULK_S2S:
      case BULK_S2G:
      case TMA_LOAD:
      case TMA_STORE:
      case BULK_COMMIT:
      case BULK_WAIT: execute_bulk(m_, w, i, mask); return Flow::Next;
      case T5_ALLOC: return allocate(w, split, i);
      case T5_DEALLOC:
      case T5_RELINQUISH:
      case T5_LD:
      case T5_ST:
      case T5_WAIT_LD:
      case T5_WAIT_ST:
      case T5_COMMIT:
      case T5_CP:
      case T5_MMA:
      case T5_FENCE: execute_tensor(m_, w, i, mask); return Flow::Next;
      case WG_FENCE:
      case WG_COMMIT:
      case WG_WAIT:
      case WG_MMA: execute_wgmma(m_, w, i); return Flow::Next;
      default: throw Fault("unsupported", "no handler for opcode " + std::to_string(i.op));
    }
  }

 private:
  u64 value(const Warp& w, int slot, int l) const {
    return m_.program.wide[static_cast<size_t>(slot)] ? w.r64(slot)[l] : w.r32(slot)[l];
  }
  void put_value(Warp& w, int slot, int l, u64 x) const {
    if (m_.program.wide[static_cast<size_t>(slot)])
      w.r64(slot)[l] = x;
    else
      w.r32(slot)[l] = static_cast<u32>(x);
  }
  u32 shared_address(const Warp& w, int slot, int offset, int l) const {
    return static_cast<u32>(value(w, slot, l)) + static_cast<u32>(offset);
  }

  // -- control flow
  // ------------------------------------------------------------------------------------------

  static Flow branch(Warp& w, size_t split, const Insn& i, u32 taken) {
    const u32 present = w.splits[split].mask, target = static_cast<u32>(i.a[0]);
    if (taken == present) {
      w.splits[split].pc = target;
      return Flow::Jumped;
    }
    if (taken == 0) return Flow::Next;
    w.splits[split].mask = present & ~taken;
    w.splits[split].pc += 1;
    w.splits.push_back({target, taken, {}});
    return Flow::Jumped;
  }

  Flow leave(Warp& w, size_t split, u32 mask) {
    w.live &= ~mask;
    w.splits[split].mask &= ~mask;
    ++m_.cluster->events;
    if (w.splits[split].mask) return Flow::Next;
    w.splits.erase(w.splits.begin() + static_cast<long>(split));
    return Flow::Gone;
  }

  // Holds the split back until it has all of `needed` that still live.
  static bool together(Warp& w, size_t split, u32 needed) {
    const u32 missing = needed & w.live & ~w.splits[split].mask;
    if (!missing) return true;
    w.splits[split].wait = {Wait::OnLanes, 0, needed, 0};
    return false;
  }

  // -- memory
  // ------------------------------------------------------------------------------------------------

  struct Place {
    const u8* read = nullptr;
    u8* write = nullptr;
  };

  Place resolve(Warp& w, int space, u64 address, u32 bytes, bool write, const char* what) {
    if (address % bytes)
      throw Fault("alignment",
                  std::string(what) + " of " + std::to_string(bytes) + " bytes at " + hex(address));
    if (space == SP_GENERIC) {
      if (address >> 32 == kSharedWindow >> 32)
        space = SP_SHARED_CLUSTER;
      else
        space = SP_GLOBAL;
    }
    Place p;
    if (space == SP_SHARED || space == SP_SHARED_CLUSTER) {
      Cta& cta = shared_target(m_, w, static_cast<u32>(address), space == SP_SHARED_CLUSTER, what);
      const u32 offset = static_cast<u32>(address) & kOffsetMask;
      if (write)
        p.write = cta.shared->write(offset, bytes, generic_access(w, what));
      else
        p.read = cta.shared->read(offset, bytes, generic_access(w, what));
    } else if (write) {
      p.write = m_.global.write(address, bytes, what);
    } else {
      p.read = m_.global.read(address, bytes, what);
    }
    return p;
  }

  u64 address_of(const Warp& w, int space, int slot, int offset, int l) const {
    if (space == SP_SHARED || space == SP_SHARED_CLUSTER) return shared_address(w, slot, offset, l);
    return value(w, slot, l) + static_cast<u64>(static_cast<i64>(offset));
  }

  // Passes over the 32 banks of 4 bytes: lanes go in groups that fetch 128 bytes, and a bank that
  // holds several of their words is visited once for each.
  void count_wavefronts(const Warp& w, int slot, int offset, u32 bytes, u32 mask,
                        const char* name) {
    const int group = bytes <= 4 ? 32 : static_cast<int>(128 / bytes);
    u64 passes = 0;
    for (int first = 0; first < kWarpSize; first += group) {
      std::array<std::set<u32>, 32> words;
      for (int l = first; l < first + group; ++l)
        if (mask >> l & 1)
          for (u32 b = 0; b < std::max(bytes, 4u); b += 4) {
            const u32 word = (shared_address(w, slot, offset, l) + b) / 4;
            words[word % 32].insert(word);
          }
      size_t most = 0;
      for (const auto& bank : words) most = std::max(most, bank.size());
      passes += most;
    }
    m_.work[name] += passes;
  }

  void load(Warp& w, const Insn& i, u32 mask) {
    const int space = i.a[0], n = i.a[1], bytes = i.a[2];
    if (space == SP_SHARED)
      count_wavefronts(w, i.a[4], i.a[5], static_cast<u32>(n * bytes), mask,
                       "ld.shared wavefronts");
    each(mask, [&](int l) {
      const Place p = resolve(w, space, address_of(w, space, i.a[4], i.a[5], l),
                              static_cast<u32>(n * bytes), false, "ld");
      for (int k = 0; k < n; ++k) {
        u64 x = 0;
        std::memcpy(&x, p.read + k * bytes, static_cast<size_t>(bytes));
        if (i.a[3] && bytes < 8)
          x = static_cast<u64>(static_cast<i64>(x << (64 - 8 * bytes)) >> (64 - 8 * bytes));
        if (i.a[6 + k] >= 0) put_value(w, i.a[6 + k], l, x);
      }
    });
  }

  void store(Warp& w, const Insn& i, u32 mask) {
    const int space = i.a[0], n = i.a[1], bytes = i.a[2];
    if (space == SP_SHARED)
      count_wavefronts(w, i.a[3], i.a[4], static_cast<u32>(n * bytes), mask,
                       "st.shared wavefronts");
    each(mask, [&](int l) {
      const Place p = resolve(w, space, address_of(w, space, i.a[3], i.a[4], l),
                              static_cast<u32>(n * bytes), true, "st");
      for (int k = 0; k < n; ++k) {
        const u64 x = value(w, i.a[5 + k], l);
        std::memcpy(p.write + k * bytes, &x, static_cast<size_t>(bytes));
      }
    });
  }

  // Lanes go in order: one of the orders that atomicity allows.
  void atomic(Warp& w, const Insn& i, u32 mask) {
    const int space = i.a[0];
    const bool wide = i.type == T_B64 || i.type == T_U64 || i.type == T_S64 || i.type == T_F64;
    const u32 bytes = wide ? 8 : i.type == T_B16 || i.type == T_F16 || i.type == T_BF16 ? 2 : 4;
    each(mask, [&](int l) {
      const u64 address = address_of(w, space, i.a[1], i.a[2], l);
      const Place from = resolve(w, space, address, bytes, false, "atom");
      u64 old = 0;
      std::memcpy(&old, from.read, bytes);
      const u64 b = value(w, i.a[4], l), c = i.n > 5 ? value(w, i.a[5], l) : 0;
      const u64 fresh = reduce(i, old, b, c);
      const Place to = resolve(w, space, address, bytes, true, "atom");
      std::memcpy(to.write, &fresh, bytes);
      if (i.a[3] >= 0) put_value(w, i.a[3], l, old);
    });
    ++m_.cluster->events;
  }

  static u64 reduce(const Insn& i, u64 old, u64 b, u64 c) {
    const bool is_signed = i.type == T_S32 || i.type == T_S64,
               narrow = i.type != T_S64 && is_signed;
    const auto s = [&](u64 x) {
      return narrow ? static_cast<i64>(static_cast<i32>(x)) : static_cast<i64>(x);
    };
    switch (i.sub) {
      case R_ADD:
        if (i.type == T_F32)
          return as_bits(as_float(static_cast<u32>(old)) + as_float(static_cast<u32>(b)));
        if (i.type == T_F64) return bit_cast<u64>(bit_cast<double>(old) + bit_cast<double>(b));
        if (i.type == T_F16 || i.type == T_BF16) {
          const Format& f = i.type == T_F16 ? kF16 : kBF16;
          return encode(decode(static_cast<u32>(old), f) + decode(static_cast<u32>(b) & 0xFFFF, f),
                        f);
        }
        return old + b;
      case R_MIN: return is_signed ? (s(old) < s(b) ? old : b) : std::min(old, b);
      case R_MAX: return is_signed ? (s(old) > s(b) ? old : b) : std::max(old, b);
      case R_AND: return old & b;
      case R_OR: return old | b;
      case R_XOR: return old ^ b;
      case R_INC: return old >= b ? 0 : old + 1;
      case R_DEC: return old == 0 || old > b ? b : old - 1;
      case R_EXCH: return b;
      case R_CAS: return old == b ? c : old;
      default: throw Fault("unsupported", "atomic operation");
    }
  }

  // PTX ISA 9.7.14 "stmatrix", "ldmatrix": 8x8 matrices of 16 bit. Lane 8j+r holds the address of
  // row r of matrix j; register j of lane t holds row t/4, columns 2*(t%4) and the next
  // (transposed: column t/4).
  void matrix_transfer(Warp& w, const Insn& i, u32 mask) {
    if (mask != kAllLanes) throw Fault("protocol", "stmatrix or ldmatrix without all 32 lanes");
    const int count = i.a[0];
    const bool transposed = i.a[1] != 0, storing = i.op == STMATRIX;
    for (int j = 0; j < count; ++j)
      for (int row = 0; row < 8; ++row) {
        const u32 a = shared_address(w, i.a[2], i.a[3], 8 * j + row);
        const Place p = resolve(w, SP_SHARED, a, 16, storing, storing ? "stmatrix" : "ldmatrix");
        for (int column = 0; column < 8; ++column) {
          const int r = transposed ? column : row, c = transposed ? row : column;
          u32& cell = w.r32(i.a[4 + j])[4 * r + c / 2];
          const int shift = 16 * (c % 2);
          if (storing) {
            const u16 x = static_cast<u16>(cell >> shift);
            std::memcpy(p.write + 2 * column, &x, 2);
          } else {
            u16 x;
            std::memcpy(&x, p.read + 2 * column, 2);
            cell = (cell & ~(0xFFFFu << shift)) | static_cast<u32>(x) << shift;
          }
        }
      }
  }

  // -- warp-wide
  // ---------------------------------------------------------------------------------------------

  Flow warp_wide(Warp& w, size_t split, const Insn& i, u32 mask) {
    if (i.op == ACTIVEMASK) {
      each(mask, [&](int l) { w.r32(i.a[0])[l] = mask; });
      return Flow::Next;
    }
    const int member_slot = i.op == WARPSYNC ? i.a[0] : i.op == SHFL ? i.a[5] : i.a[2];
    const u32 members = w.r32(member_slot)[__builtin_ctz(mask)];
    if (mask & ~members)
      throw Fault("protocol", "a lane outside the membermask " + hex(members) + " executes it");
    if (!together(w, split, members)) return Flow::Blocked;
    const u32 active = mask;
    switch (i.op) {
      case SHFL: shuffle(w, i, active); break;
      case VOTE: {
        u32 p = w.predicates[static_cast<size_t>(i.a[1])];
        if (i.flags & F_NEGATE_SOURCE) p = ~p;
        const u32 yes = p & active;
        if (i.sub == 0) {
          each(active, [&](int l) { w.r32(i.a[0])[l] = yes; });
        } else {
          const bool r = i.sub == 1   ? yes != 0
                         : i.sub == 2 ? yes == active
                                      : yes == 0 || yes == active;
          u32& d = w.predicates[static_cast<size_t>(i.a[0])];
          d = (d & ~active) | (r ? active : 0);
        }
        break;
      }
      case ELECT: {
        // Which lane is not specified, only that it is the same for the same mask: the schedule
        // chooses.
        const u32 set = members & w.live;
        int leader = __builtin_ctz(set);
        if (m_.launch.order == Order::Backward) leader = 31 - __builtin_clz(set);
        if (m_.launch.order == Order::Random) {
          Random hash(m_.launch.seed ^ members);
          do leader = static_cast<int>(hash.below(32));
          while (!(set >> leader & 1));
        }
        u32& p = w.predicates[static_cast<size_t>(i.a[1])];
        p = (p & ~active) | (active & 1u << leader);
        if (i.a[0] >= 0) each(active, [&](int l) { w.r32(i.a[0])[l] = static_cast<u32>(leader); });
        break;
      }
      case REDUX: {
        bool first = true;
        u32 d = 0;
        each(active, [&](int l) {
          u32 x = w.r32(i.a[1])[l];
          if (i.flags & F_ABS) x &= 0x7FFFFFFF;  // f32 only
          if (first) {
            d = x;
            first = false;
            return;
          }
          if (i.type == T_F32) {
            const bool nan = i.flags & F_NAN;
            d = as_bits(i.sub == 1 ? minimum(as_float(d), as_float(x), nan)
                                   : maximum(as_float(d), as_float(x), nan));
            return;
          }
          const bool less = i.type == T_S32 ? static_cast<i32>(x) < static_cast<i32>(d) : x < d;
          switch (i.sub) {
            case 0: d += x; break;
            case 1: d = less ? x : d; break;
            case 2: d = less ? d : x; break;
            case 3: d &= x; break;
            case 4: d |= x; break;
            default: d ^= x;
          }
        });
        each(active, [&](int l) { w.r32(i.a[0])[l] = d; });
        break;
      }
      case MATCH:
        each(active, [&](int l) {
          u32 same = 0;
          each(active, [&](int k) {
            same |= static_cast<u32>(value(w, i.a[1], k) == value(w, i.a[1], l)) << k;
          });
          w.r32(i.a[0])[l] = same;
        });
        break;
      default: break;  // bar.warp.sync: accesses of one warp are in one order here
    }
    return Flow::Next;
  }

  // PTX ISA 9.7.9 "shfl.sync": segments by c[12:8], clamp by c[4:0].
  void shuffle(Warp& w, const Insn& i, u32 active) {
    u32 source[kWarpSize];
    std::copy_n(w.r32(i.a[2]), kWarpSize, source);
    u32 valid = 0;
    each(active, [&](int l) {
      const u32 lane = static_cast<u32>(l), b = w.r32(i.a[3])[l] & 31, c = w.r32(i.a[4])[l];
      const u32 clamp = c & 31, segment = c >> 8 & 31, low = lane & segment,
                high = low | (clamp & ~segment);
      u32 j;
      bool in;
      switch (i.sub) {
        case 0:
          j = low | (b & ~segment);
          in = j <= high;
          break;
        case 1:
          j = lane - b;
          in = static_cast<i32>(j) >= static_cast<i32>(high);
          break;
        case 2:
          j = lane + b;
          in = j <= high;
          break;
        default: j = lane ^ b; in = j <= high;
      }
      if (!in) j = lane;
      w.r32(i.a[0])[l] = source[j & 31];
      valid |= static_cast<u32>(in) << l;
    });
    if (i.a[1] >= 0) {
      u32& p = w.predicates[static_cast<size_t>(i.a[1])];
      p = (p & ~active) | valid;
    }
  }

  // -- barriers
  // ----------------------------------------------------------------------------------------------

  Flow named_barrier(Warp& w, size_t split, const Insn& i, u32 mask) {
    // A warp counts whole (PTX ISA 9.7.13.1), so it must be in one piece.
    if (!together(w, split, w.live)) return Flow::Blocked;
    const int lane = __builtin_ctz(mask);
    const u32 id = w.r32(i.a[0])[lane];
    if (id >= 16) throw Fault("protocol", "barrier " + std::to_string(id) + " of 16");
    const u32 threads =
        i.a[1] >= 0 ? w.r32(i.a[1])[lane] : static_cast<u32>(w.cta->warps.size()) * kWarpSize;
    if (threads == 0 || threads % kWarpSize)
      throw Fault("protocol",
                  "barrier " + std::to_string(id) + " for " + std::to_string(threads) + " threads");
    NamedBarrier& b = w.cta->barriers[id];
    if (b.arrived && b.expected != threads)
      throw Fault("protocol", "barrier " + std::to_string(id) + ": one warp expects " +
                                  std::to_string(b.expected) + " threads, another " +
                                  std::to_string(threads));
    const int reduction = i.sub >= 2 ? i.sub : 0;
    if (b.arrived && b.reduction != reduction)
      throw Fault("protocol", "barrier " + std::to_string(id) +
                                  ": warps disagree on what it reduces, or whether it does");
    b.reduction = reduction;
    if (reduction) {
      u32 p = w.predicates[static_cast<size_t>(i.a[3])];
      if (i.flags & F_NEGATE_SOURCE) p = ~p;
      b.any |= (p & mask) != 0;
      b.all &= (~p & mask) == 0;
      b.targets.emplace_back(&w, static_cast<size_t>(i.a[2]));
    }
    b.expected = threads;
    b.arrived += kWarpSize;
    b.arriving.join(publish(w));
    const u64 generation = b.generation;
    if (b.arrived == b.expected) complete_barrier(b);
    if (i.sub == 1) return Flow::Next;
    if (b.generation != generation) {
      w.knows.join(b.released);
      return Flow::Next;
    }
    w.splits[split].wait = {Wait::OnBarrier, generation, id, 0};
    return Flow::Parked;
  }

  void complete_barrier(NamedBarrier& b) {
    for (const auto& [warp, slot] : b.targets) {
      u32& d = warp->predicates[slot];
      d = (b.reduction == 2 ? b.any : b.all) ? d | warp->live : d & ~warp->live;
    }
    b.targets.clear();
    b.any = false;
    b.all = true;
    b.released.join(b.arriving);
    b.arriving.clear();
    b.arrived = 0;
    ++b.generation;
    ++m_.cluster->events;
  }

  // Exited threads count as arrived (PTX ISA 9.7.13.3 "barrier.cluster"), so completion is also
  // tried on exit.
  void cluster_arrive(Warp& w, const Insn& i) {
    NamedBarrier& b = m_.cluster->barrier;
    ++b.arrived;
    const Knowledge& knows = publish(w);
    if (i.flags & F_RELAXED)  // with fence.mbarrier_init, which is not looked for
      b.arriving.relaxed.join(knows.all);
    else
      b.arriving.join(knows);
    cluster_settle();
  }
  Flow cluster_wait(Warp& w, size_t split) {
    NamedBarrier& b = m_.cluster->barrier;
    // The wait belongs to the arrival before it: generation and count say whether that phase is
    // over.
    u64& reached = cluster_phase(w);
    if (b.generation > reached) {
      ++reached;
      w.knows.join(b.released);
      return Flow::Next;
    }
    w.splits[split].wait = {Wait::OnCluster, m_.cluster->events, 0, 0};
    return Flow::Blocked;
  }
  u64& cluster_phase(Warp& w) {
    if (phases_.size() <= static_cast<size_t>(w.global))
      phases_.resize(static_cast<size_t>(w.global) + 1);
    return phases_[static_cast<size_t>(w.global)];
  }

 public:
  void cluster_settle() {
    u32 live = 0;
    for (const auto& cta : m_.cluster->ctas) live += cta->live_warps;
    NamedBarrier& b = m_.cluster->barrier;
    if (b.arrived && b.arrived >= live) complete_barrier(b);
  }
  void new_cluster() { phases_.clear(); }

 private:
  void arrive(Warp& w, const Insn& i, u32 mask) {
    const bool cluster = i.a[4] != 0;
    std::array<Cta*, kWarpSize> targets{};
    each(mask, [&](int l) {
      const u32 a = shared_address(w, i.a[1], i.a[2], l);
      Cta& cta = shared_target(m_, w, a, cluster, "mbarrier.arrive");
      mbarrier_for(w, cta, a & kOffsetMask, "mbarrier.arrive");
      targets[static_cast<size_t>(l)] = &cta;
    });
    // An arrival of several lanes is several arrivals, all with what the warp knows.
    const Knowledge knows = publish(w);
    each(mask, [&](int l) {
      const u32 a = shared_address(w, i.a[1], i.a[2], l);
      Cta& cta = *targets[static_cast<size_t>(l)];
      const u32 offset = a & kOffsetMask, operand = w.r32(i.a[3])[l];
      if (i.sub == 0) {
        mbarrier_arrive(m_, cta, offset, operand, knows, "mbarrier.arrive");
      } else {
        MBarrier& b = mbarrier_at(cta, offset, "mbarrier.expect_tx");
        mbarrier_expect(cta, offset, b, operand);
        if (i.sub == 1) mbarrier_arrive(m_, cta, offset, 1, knows, "mbarrier.arrive.expect_tx");
      }
    });
  }

  // A try_wait may also return false early (9.7.13.15.16): a blocked one is retried when something
  // has happened.
  Flow try_wait(Warp& w, size_t split, const Insn& i, u32 mask) {
    u32 done = 0, address = 0, parity = 0;
    each(mask, [&](int l) {
      const u32 a = shared_address(w, i.a[1], i.a[2], l), p = w.r32(i.a[3])[l];
      Cta& cta = shared_target(m_, w, a, false, "mbarrier.try_wait");
      MBarrier& b = mbarrier_for(w, cta, a & kOffsetMask, "mbarrier.try_wait");
      if ((b.phase & 1) != (p & 1)) {
        done |= 1u << l;
        b.seen = b.phase;
        w.knows.join(b.done);
      } else {
        address = a;
        parity = p;
      }
    });
    Wait& wait = w.splits[split].wait;
    // Nothing else can run: lanes that are done go on, the others try again.
    const bool stuck = wait.kind == Wait::OnMBarrier && wait.token == ~u64{0};
    const bool spurious = m_.launch.timing == Timing::Random && m_.random.below(4) == 0;
    if (done != mask && !spurious && !(stuck && done)) {
      wait = {Wait::OnMBarrier, m_.cluster->events, address, parity};
      return Flow::Blocked;
    }
    wait = {};
    u32& p = w.predicates[static_cast<size_t>(i.a[0])];
    p = (p & ~mask) | done;
    return Flow::Next;
  }

  Flow allocate(Warp& w, size_t split, const Insn& i) {
    const int columns = static_cast<int>(w.r32(i.a[2])[0]);
    const int base = tensor_allocate(w, columns, i.sub);
    if (base < 0) {
      w.splits[split].wait = {Wait::OnAllocation, m_.cluster->events, static_cast<u32>(columns), 0};
      return Flow::Blocked;
    }
    const u32 a = shared_address(w, i.a[0], i.a[1], 0);
    const Place p = resolve(w, SP_SHARED, a, 4, true, "tcgen05.alloc");
    const u32 address = static_cast<u32>(base);
    std::memcpy(p.write, &address, 4);
    return Flow::Next;
  }

  Machine& m_;
  std::vector<u64> phases_;
};

}  // namespace ptx
