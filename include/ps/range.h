// Range: a part of the key space.
#pragma once

#include <cstdint>

namespace ps {

// The keys from begin() on, up to but not including end().
class Range {
public:
  Range() : Range(0, 0) {}
  Range(std::uint64_t begin, std::uint64_t end) : begin_(begin), end_(end) {}
  std::uint64_t begin() const { return begin_; }
  std::uint64_t end() const { return end_; }
  std::uint64_t size() const { return end_ - begin_; }

private:
  std::uint64_t begin_, end_;
};

} // namespace ps
