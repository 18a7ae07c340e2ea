// A program of ps-lite's kind, in each role: it starts, meets the others in barriers, and ends.
#include "ps/ps.h"

using namespace ps;

int main(int, char **argv) {
  const char *name = CHECK_NOTNULL(Environment::Get()->find("DMLC_ROLE"));
  const Node::Role role = GetRole(name);
  StartPS(0, role, -1, true, argv[0]);
  bool ended = false;
  RegisterExitCallback([&ended] { ended = true; });
  CHECK_EQ(IsScheduler(), role == Node::SCHEDULER);
  CHECK_EQ(IsServer(), role == Node::SERVER);
  CHECK_EQ(NumWorkers(), 2);
  CHECK_EQ(NumServers(), 1);
  if (role == Node::SERVER)
    CHECK_EQ(MyRank(), 0);
  if (role == Node::WORKER)
    CHECK_EQ(MyRank(), GetNodeRank());
  Postoffice *office = Postoffice::Get();
  CHECK(office->role_str() == name);
  office->Barrier(0, kWorkerGroup + kServerGroup);
  if (role == Node::WORKER)
    office->DoBarrier(0, kWorkerGroup, true);
  Finalize(0, role, true);
  Finalize(0, role, true); // does nothing
  CHECK(ended);
  std::cout << name << " is done" << std::endl;
}
