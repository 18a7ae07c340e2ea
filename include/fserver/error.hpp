// What fserver throws. Every class is an Error, which is a std::runtime_error.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "fserver.h"
#include "fserver/dtype.hpp"

namespace fserver {

// An error of fserver, or of what lies below it. The base of all others.
class Error : public std::runtime_error {
public:
  explicit Error(const std::string &text, int code = EIO)
      : std::runtime_error(text), code_(code) {}
  // The errno value, greater than 0; fserver.h lists them.
  int code() const noexcept { return code_; }

private:
  int code_;
};

// The limit of a call is over. What the call waited for goes on.
class TimeoutError : public Error {
public:
  explicit TimeoutError(const std::string &text) : Error(text, ETIMEDOUT) {}
};

// A setting or an argument is wrong. The text has its name, its value and what is allowed.
class ConfigError : public Error {
public:
  explicit ConfigError(const std::string &text) : Error(text, EINVAL) {}
};

// The number, shape, size or dtype of tensors, or the number of keys, does not fit.
class ShapeError : public Error {
public:
  explicit ShapeError(const std::string &text) : Error(text, EMSGSIZE) {}
};

// As many operations are under way as a node may have. The arguments are right: the same
// call succeeds when one of the operations has ended.
class LimitError : public Error {
public:
  explicit LimitError(const std::string &text) : Error(text, EXFULL) {}
};

// The node is closed or was never opened, or the cluster has ended.
class ClosedError : public Error {
public:
  explicit ClosedError(const std::string &text) : Error(text, ESHUTDOWN) {}
};

// A node that the call needs is gone.
class PeerLostError : public Error {
public:
  explicit PeerLostError(const fs_error &e)
      : Error(e.text, ECONNRESET), role_(e.role), rank_(e.rank),
        texts_(std::make_shared<const Texts>(Texts{e.address, e.reason})) {}
  // FS_ROLE_SCHEDULER, FS_ROLE_WORKER or FS_ROLE_SERVER; -1: unknown.
  int role() const noexcept { return role_; }
  // Its rank within the role; -1: unknown.
  int rank() const noexcept { return rank_; }
  // Its address, or its process inside a host.
  const std::string &address() const noexcept { return texts_->address; }
  // What showed that it is gone.
  const std::string &reason() const noexcept { return texts_->reason; }

private:
  struct Texts {
    std::string address, reason;
  };
  int role_, rank_;
  std::shared_ptr<const Texts> texts_; // so that copies do not throw
};

// A server's application has refused a request (Server::fail).
class RefusedError : public Error {
public:
  explicit RefusedError(const fs_error &e)
      : Error(e.text, EREMOTEIO), rank_(e.rank),
        reason_(std::make_shared<const std::string>(e.reason)) {}
  // The server's rank.
  int rank() const noexcept { return rank_; }
  // The server's text, at most 500 bytes of UTF-8.
  const std::string &reason() const noexcept { return *reason_; }

private:
  int rank_;
  std::shared_ptr<const std::string> reason_;
};

namespace detail {

[[noreturn]] inline void raise(const fs_error &e) {
  std::string text = e.text;
  if (e.want != FS_ANY)
    text += std::string(": ") + name_of(static_cast<DType>(e.got)) + " for " +
            name_of(static_cast<DType>(e.want));
  switch (-e.code) {
  case EINVAL:
    throw ConfigError(text);
  case EMSGSIZE:
    throw ShapeError(text);
  case EXFULL:
    throw LimitError(text);
  case ETIMEDOUT:
    throw TimeoutError(text);
  case ECONNRESET:
    throw PeerLostError(e);
  case EREMOTEIO:
    throw RefusedError(e);
  case ESHUTDOWN:
  case EBADF:
    throw ClosedError(text);
  default:
    throw Error(text, -e.code);
  }
}

// What a call that returned rc < 0 has left as the thread's last error.
inline fs_error last_error(const char *call, int rc) {
  fs_error e;
  if (fs_errmsg(&e) < 0) {
    e = {};
    e.code = rc;
    e.role = e.rank = -1;
    e.got = e.want = FS_ANY;
    const std::string text = std::string(call) + ": " + std::strerror(-rc);
    std::strncpy(e.text, text.c_str(), sizeof e.text - 1);
  }
  return e;
}

inline void check(const char *call, int rc) {
  if (rc < 0)
    raise(last_error(call, rc));
}

} // namespace detail
} // namespace fserver
