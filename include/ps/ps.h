// The interface of ps-lite: programs that were written for it include this file.
//
//   ps::StartPS(0, ps::GetRole(getenv("DMLC_ROLE")), -1, true);
//   ... KVWorker, KVServer ...
//   ps::Finalize(0, role);
//
// docs/ps-lite.md says what is the same as there and what is not. What fserver finds wrong it throws, see
// fserver/error.hpp.
#pragma once

#include "ps/base.h"
#include "ps/internal/life.h"
#include "ps/internal/threadsafe_queue.h"
#include "ps/kv_app.h"
#include "ps/simple_app.h"

// The tensor API, as in StepMesh: for programs that are compiled with torch's headers.
#if __has_include(<ATen/ATen.h>)
#include "ps/af_tensor_app.h"
#endif
