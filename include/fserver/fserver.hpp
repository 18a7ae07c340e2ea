// The C++ interface of fserver: everything that new code includes.
//
//   fserver::Worker worker;  // settings from the environment
//   fserver::Memory out(4096), in(4096);
//   auto x = out.tensor(fserver::DType::kFloat32, {1024}, /*key=*/0);
//   auto y = in.tensor(fserver::DType::kFloat32, {1024}, /*key=*/0);
//   worker.push_pull(x, y).wait(std::chrono::seconds(1));
//   worker.stop();
//
// C++17, header only, over fserver.h. Errors are exceptions, see error.hpp. In the steady
// state push_pull, wait, get_batch and respond allocate nothing.
#pragma once

#include "fserver/dtype.hpp"
#include "fserver/error.hpp"
#include "fserver/handle.hpp"
#include "fserver/memory.hpp"
#include "fserver/message.hpp"
#include "fserver/node.hpp"
#include "fserver/options.hpp"
#include "fserver/scheduler.hpp"
#include "fserver/server.hpp"
#include "fserver/tensor.hpp"
#include "fserver/watch.hpp"
#include "fserver/worker.hpp"
