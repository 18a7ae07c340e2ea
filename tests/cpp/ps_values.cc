// What programs of ps-lite use without a cluster: arrays, ranges, variables, CHECK and LOG.
#include <sys/wait.h>
#include <unistd.h>

#include "ps/ps.h"
#include "test.hpp"

using namespace ps;

CASE(arrays_share) {
  SArray<int> a{1, 2, 3, 4};
  SArray<int> b = a, part = a.segment(1, 3);
  b[1] = 7;
  EXPECT_EQ(part.size(), 2u);
  EXPECT_EQ(part[0], 7);
  EXPECT_EQ(a.back(), 4);
  SArray<char> raw(a);
  EXPECT_EQ(raw.size(), 4 * sizeof(int));
  EXPECT_EQ(static_cast<void *>(raw.data()), static_cast<void *>(a.data()));
  a.clear();
  EXPECT(a.empty());
  EXPECT_EQ(SArray<int>(raw)[1], 7);
  EXPECT_THROW(fserver::ShapeError, "3 bytes are no whole elements of 4",
               SArray<int> x(raw.segment(0, 3)));
  EXPECT_THROW(fserver::ShapeError, "[2, 5) is not in 4 elements",
               b.segment(2, 5));
}

CASE(arrays_own) {
  int gone = 0;
  {
    SArray<int> a;
    int mine[2] = {1, 2};
    a.reset(mine, 2, [&gone](int *) { gone++; });
    SArray<char> raw(a);
    const SArray<int> part = a.segment(1, 2);
    a.clear();
    EXPECT_EQ(gone, 0);
    EXPECT_EQ(part[0], 2);
  }
  EXPECT_EQ(gone, 1);
  SArray<int> grows(2, 9);
  SArray<int> before = grows;
  grows.push_back(1);
  grows.resize(5, 3);
  EXPECT_EQ(before.size(), 2u);
  EXPECT(grows[1] == 9 && grows[2] == 1 && grows[4] == 3);
  SArray<int> owned(new int[3]{1, 2, 3}, 3, true);
  EXPECT_EQ(owned[2], 3);
  const auto kept = std::make_shared<std::vector<int>>(3, 5);
  SArray<int> shares(kept);
  (*kept)[0] = 6;
  EXPECT_EQ(shares[0], 6);
  const std::vector<int> v{4, 5};
  SArray<int> copies(v);
  copies.CopyFrom(copies.data() + 1, 1);
  EXPECT(copies.size() == 1 && copies[0] == 5);
}

CASE(variables) {
  setenv("PS_TEST_NUMBER", "12", 1);
  unsetenv("PS_TEST_NONE");
  const Environment *env = Environment::Get();
  EXPECT(std::string(env->find("PS_TEST_NUMBER")) == "12");
  EXPECT(env->find("PS_TEST_NONE") == nullptr);
  int n = 0;
  env->find("PS_TEST_NUMBER", &n, 3);
  EXPECT_EQ(n, 12);
  env->find("PS_TEST_NONE", &n, 3);
  EXPECT_EQ(n, 3);
  Environment::Get()->Set("PS_TEST_NUMBER", "twelve");
  EXPECT_THROW(fserver::ConfigError, "PS_TEST_NUMBER=twelve: want a number",
               GetEnv("PS_TEST_NUMBER", 1));
}

CASE(numbers_and_ranges) {
  setenv("DMLC_NUM_SERVER", "3", 1);
  const auto &ranges = Postoffice::GetServer()->GetServerKeyRanges();
  EXPECT_EQ(ranges.size(), 3u);
  EXPECT_EQ(ranges[0].begin(), 0u);
  EXPECT_EQ(ranges[1].begin(), ranges[0].end());
  EXPECT_EQ(ranges[2].size(), kMaxKey / 3);
  unsetenv("DMLC_NUM_SERVER");
  EXPECT_EQ(Postoffice::WorkerRankToID(2), 13);
  EXPECT_EQ(Postoffice::ServerRankToID(2), 12);
  EXPECT_EQ(Postoffice::IDtoRank(13), 2);
  EXPECT(GetRole("server") == Node::SERVER);
  EXPECT_THROW(fserver::ConfigError, "the role is \"cook\"", GetRole("cook"));
  EXPECT_THROW(fserver::ClosedError, "StartPS has not been called", MyRank());
  EXPECT_THROW(fserver::ClosedError, "no worker has been started",
               Postoffice::GetWorker()->worker());
  Finalize(0, Node::WORKER); // does nothing
}

CASE(a_check_that_fails_ends_the_program) {
  CHECK(true) << "not shown";
  CHECK_EQ(2, 1 + 1);
  CHECK_LT(1, 2);
  EXPECT_EQ(*CHECK_NOTNULL(std::make_unique<int>(4).get()), 4);
  LOG(INFO) << "a line";
  PS_VLOG(9) << "not shown";
  if (false)
    CHECK_NE(1, 1);
  else
    CHECK_GE(1, 1); // each is one statement
  for (int way = 0; way < 3; way++) {
    int out[2];
    EXPECT_EQ(pipe(out), 0);
    const pid_t pid = fork();
    if (pid == 0) {
      dup2(out[1], 2);
      if (way == 0)
        CHECK_EQ(1, 2) << "why";
      else if (way == 1)
        LOG(FATAL) << "why";
      else
        PS_CHECK_NOTNULL(static_cast<int *>(nullptr));
      _exit(0);
    }
    close(out[1]);
    char text[512];
    const ssize_t n = read(out[0], text, sizeof text - 1);
    text[n < 0 ? 0 : n] = 0;
    int status = 0;
    waitpid(pid, &status, 0);
    EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    const char *want[] = {"Check failed: 1 == 2 (1 vs. 2) why", "why",
                          " is null"};
    EXPECT(std::strstr(text, want[way]) != nullptr);
  }
}
