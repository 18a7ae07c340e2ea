// A program that has dmlc-core's dmlc/logging.h, too: before ours, after it, or in its place.
#if defined FOREIGN_before
#include "foreign/dmlc/logging.h"
#endif
#include "ps/internal/logging.h"
#if defined FOREIGN_after
#include "foreign/dmlc/logging.h"
#endif
#include "test.hpp"

CASE(checks_and_errors) {
  dmlc::InitLogging("");
  CHECK(true) << "never said";
  CHECK_EQ(1, 1) << "never said";
  PS_CHECK_EQ(1, 1) << "never said";
  PS_CHECK(true);
  LOG(INFO) << "a line\n";
  PS_LOG(INFO) << "a line";
  EXPECT_THROW(dmlc::Error, "text", throw dmlc::Error("text"));
}
