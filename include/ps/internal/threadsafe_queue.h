// ThreadsafeQueue: a queue between threads.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <queue>
#include <utility>

namespace ps {

template <class T> class ThreadsafeQueue {
public:
  void Push(T value) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push(std::move(value));
    }
    filled_.notify_one();
  }
  // Takes the oldest value, and waits until there is one.
  void WaitAndPop(T *value) {
    std::unique_lock<std::mutex> lock(mutex_);
    filled_.wait(lock, [this] { return !queue_.empty(); });
    *value = std::move(queue_.front());
    queue_.pop();
  }
  // Takes the oldest value. Returns false if there is none.
  bool TryPop(T *value) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty())
      return false;
    *value = std::move(queue_.front());
    queue_.pop();
    return true;
  }
  std::size_t Size() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.size();
  }

private:
  mutable std::mutex mutex_;
  std::condition_variable filled_;
  std::queue<T> queue_;
};

} // namespace ps
