// Memories, and the happens-before bookkeeping that every access is checked against.
//
// An agent is whatever performs accesses in an order of its own: a warp, or an asynchronous unit. A
// Clock holds, for each agent, how many of its epochs are known to be over. Barriers copy clocks
// from those who arrive to those who wait (PTX ISA 8, "Memory consistency model": release, acquire
// and causality order). A read or write must know of the last write to its bytes, and a write of
// the last read. A second clock counts only what a fence.proxy.async has carried from the generic
// to the async proxy (8.2.1 "Proxies", 9.7.13.4 "fence").
#pragma once

#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "numeric.hpp"

namespace ptx {

struct Fault : std::runtime_error {
  std::string kind;
  Fault(std::string kind_, const std::string& what)
      : std::runtime_error(what), kind(std::move(kind_)) {}
};

inline std::string hex(u64 x) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

class Clock {
 public:
  u32 get(int agent) const {
    return static_cast<size_t>(agent) < epochs_.size() ? epochs_[static_cast<size_t>(agent)] : 0;
  }
  void raise(int agent, u32 epoch) {
    if (static_cast<size_t>(agent) >= epochs_.size())
      epochs_.resize(static_cast<size_t>(agent) + 1);
    auto& e = epochs_[static_cast<size_t>(agent)];
    e = std::max(e, epoch);
  }
  void join(const Clock& other) {
    if (other.epochs_.size() > epochs_.size()) epochs_.resize(other.epochs_.size());
    for (size_t i = 0; i < other.epochs_.size(); ++i)
      epochs_[i] = std::max(epochs_[i], other.epochs_[i]);
  }
  void clear() { epochs_.clear(); }
  int size() const { return static_cast<int>(epochs_.size()); }

 private:
  std::vector<u32> epochs_;
};

// What a thread knows: of everything, of generic writes that the async proxy sees, and what relaxed
// arrivals have told it, which is good for the initialisation of mbarriers only.
struct Knowledge {
  Clock all, fenced, relaxed;
  void join(const Knowledge& other) {
    all.join(other.all);
    fenced.join(other.fenced);
    relaxed.join(other.relaxed);
  }
  void clear() {
    all.clear();
    fenced.clear();
    relaxed.clear();
  }
};

// Agents of one launch unit (a cluster): six for each warp, one tensor core for each CTA, then
// mbarriers.
enum WarpAgent { kGeneric, kCopy, kBulk, kTmemStore, kTmemLoad, kWgmma, kWarpAgents };

class Agents {
 public:
  Agents(int warps, int ctas, int warps_per_cta)
      : warps_(warps), warps_per_cta_(warps_per_cta), next_(warps * kWarpAgents + ctas) {}
  int warp(int w, WarpAgent role) const { return w * kWarpAgents + role; }
  int tensor(int cta) const { return warps_ * kWarpAgents + cta; }
  bool is_tensor(int agent) const {
    return agent >= warps_ * kWarpAgents && agent < next_ - static_cast<int>(names_.size());
  }
  int add(std::string name) {
    names_.push_back(std::move(name));
    return next_++;
  }
  // Whether its writes go through the generic proxy; cp.async without .bulk does.
  bool generic(int agent) const {
    return agent < warps_ * kWarpAgents && agent % kWarpAgents <= kCopy;
  }
  std::string name(int agent) const {
    static const char* const roles[] = {"generic accesses", "cp.async",   "bulk copies",
                                        "tcgen05.st",       "tcgen05.ld", "wgmma"};
    const int fixed = next_ - static_cast<int>(names_.size());
    if (agent >= fixed) return names_[static_cast<size_t>(agent - fixed)];
    if (agent >= warps_ * kWarpAgents)
      return "tensor core of CTA " + std::to_string(agent - warps_ * kWarpAgents);
    const int w = agent / kWarpAgents;
    return std::string(roles[agent % kWarpAgents]) + " of CTA " +
           std::to_string(w / warps_per_cta_) + " warp " + std::to_string(w % warps_per_cta_);
  }

 private:
  int warps_, warps_per_cta_, next_;
  std::vector<std::string> names_;
};

struct Tag {
  int agent = -1;
  u32 epoch = 0;
};

// Who accesses, and what that agent knew when the access was issued.
struct Access {
  const Agents* agents;
  const Knowledge* knows;
  int agent;
  u32 epoch;
  bool async;        // through the async proxy
  const char* what;  // for messages
};

// Last writer and unordered readers of each cell (FastTrack, Flanagan and Freund 2009): one reader
// is kept while each new one knows of it; only then, rarely, a clock of several.
class Tags {
 public:
  explicit Tags(size_t cells) : writer_(cells), reader_(cells) {}

  // `place` is a callable: its text is made only for a message.
  template <class Place>
  void read(size_t cell, const Access& by, Place place) {
    require(writer_[cell], by, place, "reads", "was written by");
    Tag& last = reader_[cell];
    if (last.agent == kSeveral) {
      several_[cell].raise(by.agent, by.epoch);
    } else if (last.agent < 0 || last.agent == by.agent || known(last, by)) {
      last = {by.agent, by.epoch};
    } else {
      Clock& clock = several_[cell];
      clock.raise(last.agent, last.epoch);
      clock.raise(by.agent, by.epoch);
      last.agent = kSeveral;
    }
  }
  template <class Place>
  void write(size_t cell, const Access& by, Place place) {
    require(writer_[cell], by, place, "overwrites", "was written by");
    Tag& last = reader_[cell];
    if (last.agent == kSeveral) {
      const Clock& clock = several_[cell];
      for (int agent = 0; agent < clock.size(); ++agent)
        if (clock.get(agent))
          require_known({agent, clock.get(agent)}, by, place, "overwrites", "is still read by");
      several_.erase(cell);
    } else {
      require_known(last, by, place, "overwrites", "is still read by");
    }
    writer_[cell] = {by.agent, by.epoch};
    last = {};
  }
  void stamp(size_t cell, int agent, u32 epoch) { writer_[cell] = {agent, epoch}; }

 private:
  static constexpr int kSeveral = -2;

  static bool known(const Tag& t, const Access& by) {
    return by.knows->all.get(t.agent) >= t.epoch;
  }
  template <class Place>
  static void require_known(const Tag& t, const Access& by, Place place, const char* verb,
                            const char* other) {
    if (t.agent < 0 || t.agent == by.agent || known(t, by)) return;
    throw Fault("race", std::string(by.what) + " " + verb + " " + place() + ", which " + other +
                            " the " + by.agents->name(t.agent) +
                            " without a synchronisation in between");
  }
  template <class Place>
  static void require(const Tag& t, const Access& by, Place place, const char* verb,
                      const char* other) {
    require_known(t, by, place, verb, other);
    if (by.async && t.agent >= 0 && by.agents->generic(t.agent) &&
        by.knows->fenced.get(t.agent) < t.epoch)
      throw Fault("race", std::string(by.what) + " " + verb + " " + place() + ", which " + other +
                              " the " + by.agents->name(t.agent) +
                              " without a fence.proxy.async in between");
  }
  std::vector<Tag> writer_, reader_;
  std::unordered_map<size_t, Clock> several_;
};

// Host memory that kernels may touch. `written` empty: all of it holds data.
struct Allocation {
  u64 base, size;
  bool writable;
  std::string name;
  u8* written;  // one byte for each byte, or null
};

class GlobalMemory {
 public:
  void add(Allocation a) { allocations_.push_back(std::move(a)); }

  u8* read(u64 address, u64 size, const char* what) {
    const Allocation& a = find(address, size, what);
    if (a.written)
      for (u64 i = 0; i < size; ++i)
        if (!a.written[address - a.base + i])
          throw Fault("unwritten", std::string(what) + " reads byte " +
                                       std::to_string(address - a.base + i) + " of " + a.name +
                                       ", which nothing has written");
    return reinterpret_cast<u8*>(address);
  }
  u8* write(u64 address, u64 size, const char* what) {
    const Allocation& a = find(address, size, what);
    if (!a.writable)
      throw Fault("bounds", std::string(what) + " writes to the read-only " + a.name);
    if (a.written) std::memset(a.written + (address - a.base), 1, size);
    return reinterpret_cast<u8*>(address);
  }

 private:
  const Allocation& find(u64 address, u64 size, const char* what) {
    if (last_ < allocations_.size() && inside(allocations_[last_], address, size))
      return allocations_[last_];
    for (last_ = 0; last_ < allocations_.size(); ++last_)
      if (inside(allocations_[last_], address, size)) return allocations_[last_];
    const Allocation* nearest = nullptr;
    u64 best = ~u64{0};
    for (const auto& a : allocations_) {
      const u64 gap = address < a.base ? a.base - address : address - a.base;
      if (gap < best) {
        best = gap;
        nearest = &a;
      }
    }
    std::string where =
        nearest ? "; nearest: offset " + std::to_string(static_cast<i64>(address - nearest->base)) +
                      " of " + nearest->name + " (" + std::to_string(nearest->size) + " bytes)"
                : "";
    throw Fault("bounds", std::string(what) + " of " + std::to_string(size) + " bytes at global " +
                              hex(address) + " is outside every allocation" + where);
  }
  static bool inside(const Allocation& a, u64 address, u64 size) {
    return address >= a.base && address - a.base <= a.size && size <= a.size - (address - a.base);
  }
  std::vector<Allocation> allocations_;
  size_t last_ = 0;
};

// Shared memory of one CTA. Offsets start at kReserved: the first 1024 bytes belong to the system.
class SharedMemory {
 public:
  static constexpr u32 kReserved = 1024;
  enum State : u8 { kNever, kWritten, kInFlight, kBarrier };

  SharedMemory(u32 size, int rank)
      : bytes_(size + kReserved, 0xFF),
        state_(size + kReserved, kNever),
        tags_(size + kReserved),
        rank_(rank) {}

  const u8* read(u32 offset, u32 size, const Access& by) {
    bounds(offset, size, by);
    for (u32 i = offset; i < offset + size; ++i)
      if (state_[i] != kWritten) throw unreadable(i, by);
    for (u32 i = offset; i < offset + size; ++i) tags_.read(i, by, [&] { return place(i); });
    return bytes_.data() + offset;
  }
  u8* write(u32 offset, u32 size, const Access& by, State state = kWritten) {
    bounds(offset, size, by);
    for (u32 i = offset; i < offset + size; ++i) {
      if (state_[i] == kBarrier && state != kBarrier)
        throw Fault("race", std::string(by.what) + " overwrites the mbarrier at " + place(i));
      if (state_[i] == kInFlight)
        throw Fault("race", std::string(by.what) + " overwrites " + place(i) +
                                " while an asynchronous copy into it is in flight");
      state_[i] = state;
    }
    for (u32 i = offset; i < offset + size; ++i) tags_.write(i, by, [&] { return place(i); });
    return bytes_.data() + offset;
  }
  // The end of a copy that write(..., kInFlight) announced.
  u8* land(u32 offset, u32 size, int agent, u32 epoch) {
    std::fill_n(state_.begin() + offset, size, kWritten);
    for (u32 i = offset; i < offset + size; ++i) tags_.stamp(i, agent, epoch);
    return bytes_.data() + offset;
  }
  // The bytes of an mbarrier object: opaque to loads and stores.
  void hold_barrier(u32 offset, const Access& by) {
    bounds(offset, 8, by);
    std::fill_n(state_.begin() + offset, 8, kBarrier);
  }
  void release_barrier(u32 offset) { std::fill_n(state_.begin() + offset, 8, kNever); }
  u32 size() const { return static_cast<u32>(bytes_.size()); }
  std::string place(u32 offset) const {
    return "shared byte " + std::to_string(offset - kReserved) + " of CTA " + std::to_string(rank_);
  }

 private:
  void bounds(u32 offset, u32 size, const Access& by) const {
    if (offset < kReserved || offset > bytes_.size() || size > bytes_.size() - offset)
      throw Fault("bounds", std::string(by.what) + " of " + std::to_string(size) + " bytes at " +
                                place(offset) + " is outside its " +
                                std::to_string(bytes_.size() - kReserved) + " bytes");
  }
  Fault unreadable(u32 i, const Access& by) const {
    if (state_[i] == kInFlight)
      return Fault("race", std::string(by.what) + " reads " + place(i) +
                               " while an asynchronous copy into it is in flight");
    if (state_[i] == kBarrier)
      return Fault("race", std::string(by.what) + " reads the mbarrier at " + place(i));
    return Fault("unwritten",
                 std::string(by.what) + " reads " + place(i) + ", which nothing has written");
  }
  std::vector<u8> bytes_;
  std::vector<u8> state_;
  Tags tags_;
  int rank_;
};

// Tensor memory of one CTA: 128 lanes x 512 columns x 32 bit (PTX ISA 9.7.16.1). Tags are kept for
// a column of one warp's 32 lanes; every access covers whole such groups or, for matrices of 64
// rows, 16 of them.
class TensorMemory {
 public:
  static constexpr int kLanes = 128, kColumns = 512;

  explicit TensorMemory(int rank)
      : cells_(kLanes * kColumns),
        written_(kLanes * kColumns),
        owner_(kColumns, -1),
        tags_(4 * kColumns),
        rank_(rank) {}

  // Lanes [lane, lane + 32 * n) share tags; check once for each column and quarter, then touch
  // cells.
  void read(int quarter, int column, const Access& by) {
    allocated(column, by);
    tags_.read(static_cast<size_t>(quarter * kColumns + column), by,
               [&] { return place(quarter * 32, column); });
  }
  void write(int quarter, int column, const Access& by) {
    allocated(column, by);
    tags_.write(static_cast<size_t>(quarter * kColumns + column), by,
                [&] { return place(quarter * 32, column); });
  }
  u32 get(int lane, int column, const char* what) const {
    const auto i = index(lane, column);
    if (!written_[i])
      throw Fault("unwritten", std::string(what) + " reads " + place(lane, column) +
                                   ", which nothing has written");
    return cells_[i];
  }
  void set(int lane, int column, u32 value) {
    const auto i = index(lane, column);
    cells_[i] = value;
    written_[i] = 1;
  }
  // First fit from the top, so that a kernel that assumes base 0 is found out. -1: no room now.
  int allocate(int columns) {
    for (int base = kColumns - columns; base >= 0; base -= columns)
      if (std::all_of(owner_.begin() + base, owner_.begin() + base + columns,
                      [](int o) { return o < 0; })) {
        std::fill_n(owner_.begin() + base, columns, base);
        for (int lane = 0; lane < kLanes; ++lane)
          std::fill_n(written_.begin() + static_cast<long>(index(lane, base)), columns, 0);
        return base;
      }
    return -1;
  }
  void release(int base, int columns) {
    if (base < 0 || base + columns > kColumns || owner_[static_cast<size_t>(base)] != base)
      throw Fault("protocol", "tcgen05.dealloc of " + std::to_string(columns) + " columns at " +
                                  std::to_string(base) + " does not match an allocation");
    std::fill_n(owner_.begin() + base, columns, -1);
  }
  bool any_allocated() const {
    return std::any_of(owner_.begin(), owner_.end(), [](int o) { return o >= 0; });
  }

 private:
  static size_t index(int lane, int column) {
    return static_cast<size_t>(lane * kColumns + column);
  }
  std::string place(int lane, int column) const {
    return "tensor memory lane " + std::to_string(lane) + " column " + std::to_string(column) +
           " of CTA " + std::to_string(rank_);
  }
  void allocated(int column, const Access& by) const {
    if (column < 0 || column >= kColumns || owner_[static_cast<size_t>(column)] < 0)
      throw Fault("bounds", std::string(by.what) + " touches column " + std::to_string(column) +
                                " of tensor memory, which is not allocated");
  }
  std::vector<u32> cells_;
  std::vector<u8> written_;
  std::vector<int> owner_;
  Tags tags_;
  int rank_;
};

}  // namespace ptx
