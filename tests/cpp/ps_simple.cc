// SimpleApp: requests between all roles.
#include <atomic>
#include <set>
#include <thread>

#include "scenes.hpp"

using namespace ps;

namespace {

int own_id() { return Postoffice::Get()->van()->my_node().id; }

void until(const std::atomic<int> &count, int n) {
  while (count.load() < n)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

} // namespace

// The scheduler asks all workers and servers, many times, and adds up their answers.
BARE_SCENE(the_scheduler_asks_all, 3, 2) {
  static const int kTimes = 50;
  StartPS(0, own_role(), -1, true);
  std::atomic<int> asked{0}, sum{0};
  SimpleApp app(7, 0);
  if (IsScheduler()) {
    std::multiset<int> senders;
    app.set_response_handle([&](const SimpleData &r, SimpleApp *self) {
      EXPECT(self == &app && r.head >= 0 && r.customer_id == 0);
      senders.insert(r.sender);
      sum += std::stoi(r.body);
    });
    std::vector<int> open;
    for (int i = 0; i < kTimes; i++)
      open.push_back(
          app.Request(i, std::to_string(i), kWorkerGroup + kServerGroup));
    int want = 0;
    for (int i = 0; i < kTimes; i++) {
      EXPECT_EQ(open[static_cast<std::size_t>(i)], i);
      app.Wait(i);
      want += 5 * i + 9 + 11 + 13 + 8 + 10;
    }
    EXPECT_EQ(sum.load(), want);
    for (int id : {9, 11, 13, 8, 10})
      EXPECT_EQ(senders.count(id), std::size_t{kTimes});
    app.Wait(0); // ended long ago
    return Finalize(0, own_role());
  }
  app.set_request_handle([&](const SimpleData &r, SimpleApp *self) {
    EXPECT(r.sender == kScheduler && r.head == std::stoi(r.body));
    self->Response(r, std::to_string(r.head + own_id()));
    asked++;
  });
  until(asked, kTimes);
  Finalize(0, own_role());
}

// Worker to worker, server to worker, worker to server, all to the scheduler, and to oneself.
BARE_SCENE(each_asks_each, 2, 2) {
  StartPS(0, own_role(), -1, true);
  SimpleApp app(0, 0);
  std::atomic<int> asked{0}, answered{0};
  app.set_request_handle([&](const SimpleData &r, SimpleApp *self) {
    self->Response(r, r.body + " to " + std::to_string(own_id()));
    asked++;
  });
  app.set_response_handle([&](const SimpleData &r, SimpleApp *) {
    EXPECT(r.body ==
           std::to_string(own_id()) + " to " + std::to_string(r.sender));
    answered++;
  });
  const std::string me = std::to_string(own_id());
  for (int id : {8, 9, 10, 11, kScheduler})
    app.Wait(app.Request(id, me, id));
  EXPECT_EQ(answered.load(), 5);
  app.Wait(app.Request(0, me, kScheduler + kServerGroup + kWorkerGroup));
  EXPECT_EQ(answered.load(), 10);
  until(asked, 10); // of five, twice
  Finalize(0, own_role());
}

// Several apps and customers; responses later and from other threads; bodies of all sizes.
SCENE(apps_customers_and_late_responses, 2, 1) {
  SimpleApp one(1, 0), other(2, 0), second(1, 1);
  EXPECT_THROW(fserver::ConfigError, "has a SimpleApp with customer_id 1",
               SimpleApp(1, 1));
  Postoffice *p = Postoffice::Get();
  EXPECT(p->GetCustomer(1, 1) == second.get_customer());
  EXPECT(second.get_customer()->app_id() == 1 &&
         second.get_customer()->customer_id() == 1);
  EXPECT(!p->GetCustomer(1, 2) && !p->GetCustomer(3, 0, 0));
  std::vector<std::thread> later;
  const auto echo = [&](const SimpleData &r, SimpleApp *self) {
    later.emplace_back([r, self] { self->Response(r, r.body); });
  };
  for (SimpleApp *a : {&one, &other, &second})
    a->set_request_handle([&](const SimpleData &r, SimpleApp *self) {
      self->Response(r, "empty " + r.body);
    });
  one.set_request_handle(echo);
  p->Barrier(0, kWorkerGroup + kServerGroup);
  if (p->is_worker()) {
    for (std::size_t n :
         {std::size_t{0}, std::size_t{1}, std::size_t{999'976}}) {
      std::atomic<int> got{0};
      one.set_response_handle([&](const SimpleData &r, SimpleApp *) {
        EXPECT(r.body == std::string(n, 'x'));
        got++;
      });
      one.Wait(one.Request(0, std::string(n, 'x'), 8));
      EXPECT_EQ(got.load(), 1);
    }
    std::atomic<int> got{0};
    for (SimpleApp *a : {&other, &second})
      a->set_response_handle([&](const SimpleData &r, SimpleApp *) {
        EXPECT(r.body == "empty x");
        got++;
      });
    const int a = other.Request(1, "x", kServerGroup),
              b = second.Request(1, "x", kServerGroup);
    second.Wait(b);
    other.Wait(a);
    EXPECT_EQ(got.load(), 2);
    EXPECT_THROW(fserver::ConfigError, "the body has 999977 bytes",
                 one.Request(0, std::string(999'977, 'x'), 8));
    for (int id : {0, -1})
      EXPECT_THROW(fserver::ConfigError, "recv_id is", one.Request(0, "", id));
    EXPECT_THROW(fserver::ConfigError, "rank 5 of the servers",
                 one.Request(0, "", 18));
    EXPECT_THROW(fserver::ConfigError, "timestamp is 99", one.Wait(99));
    EXPECT_THROW(fserver::ConfigError, "the handle is empty",
                 one.set_request_handle(nullptr));
  }
  p->Barrier(0, kWorkerGroup + kServerGroup);
  for (std::thread &t : later)
    t.join();
}

// A request waits for its app, for a while.
SCENE(requests_before_the_app, 1, 1) {
  Postoffice *p = Postoffice::Get();
  if (p->is_worker()) {
    SimpleApp soon(0, 0), never(1, 0);
    soon.Wait(soon.Request(0, "", 8));
    const auto e = EXPECT_THROW(fserver::RefusedError,
                                "there is no SimpleApp with app_id 1",
                                never.Wait(never.Request(0, "", 8)));
    EXPECT_EQ(e.rank(), 0);
    p->Barrier(0, kWorkerGroup + kServerGroup);
    return;
  }
  detail::app_wait_ms = 1000;
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  SimpleApp soon(0, 0); // which answers by default
  p->Barrier(0, kWorkerGroup + kServerGroup);
}

// A handler that throws refuses its request. Too many that wait are refused, and the others answered.
SCENE(refusals, 1, 1) {
  Postoffice *p = Postoffice::Get();
  SimpleApp app(0, 0);
  std::atomic<bool> open{false};
  app.set_request_handle([&](const SimpleData &r, SimpleApp *self) {
    if (r.head == 1)
      throw std::runtime_error("head 1 is not known");
    while (!open)
      std::this_thread::yield();
    self->Response(r);
  });
  p->Barrier(0, kWorkerGroup + kServerGroup);
  if (p->is_worker()) {
    EXPECT_THROW(fserver::RefusedError,
                 "server 0 has refused the request: head 1 is not known",
                 app.Wait(app.Request(1, "", 8)));
    std::vector<int> all;
    for (int i = 0; i < 1100; i++)
      all.push_back(app.Request(0, "", 8));
    EXPECT_THROW(fserver::RefusedError, "too many requests wait",
                 app.Wait(all.back()));
    app.set_request_handle(
        [](const SimpleData &r, SimpleApp *self) { self->Response(r); });
    p->Barrier(0, kWorkerGroup + kServerGroup);
    int refused = 0;
    for (int t : all) {
      try {
        app.Wait(t);
      } catch (const fserver::RefusedError &) {
        refused++;
      }
    }
    EXPECT(refused > 0 && refused < 200);
  } else {
    p->Barrier(0, kWorkerGroup + kServerGroup);
    open = true;
  }
  p->Barrier(0, kWorkerGroup + kServerGroup);
}

// A receiver that is lost before it has answered: Wait throws, and GetDeadNodes names it.
BARE_SCENE(a_receiver_is_lost, 2, 1) {
  StartPS(0, own_role(), -1, true);
  Postoffice *p = Postoffice::Get();
  std::atomic<int> asked{0};
  SimpleApp app(0, 0);
  if (IsWorker() && MyRank() == 1) {
    app.set_request_handle(
        [&](const SimpleData &, SimpleApp *) { asked++; }); // no answer
    until(asked, 2);
    return Finalize(0, own_role(), false);
  }
  if (IsWorker()) {
    EXPECT(p->GetDeadNodes().empty());
    const int one = app.Request(0, "", 11),
              all = app.Request(0, "", kWorkerGroup + kServerGroup);
    const auto e =
        EXPECT_THROW(fserver::PeerLostError,
                     "worker 1 is gone, and has not answered", app.Wait(one));
    EXPECT(e.rank() == 1 && e.role() == FS_ROLE_WORKER);
    EXPECT_THROW(fserver::PeerLostError, "worker 1", app.Wait(all));
    EXPECT_THROW(fserver::PeerLostError, "worker 1",
                 app.Wait(app.Request(0, "", kWorkerGroup)));
    app.Wait(app.Request(0, "", 8));
    EXPECT(p->GetDeadNodes() == std::vector<int>{11});
  }
  try {
    Finalize(0, own_role());
  } catch (const fserver::PeerLostError &) { // of worker 1
  }
}

// A receiver that is lost is noticed also while other messages come all the time.
BARE_SCENE(a_receiver_is_lost_while_others_talk, 2, 1) {
  StartPS(0, own_role(), -1, true);
  std::atomic<int> asked{0};
  SimpleApp app(0, 0);
  if (IsWorker() && MyRank() == 1) {
    app.set_request_handle(
        [&](const SimpleData &, SimpleApp *) { asked++; }); // no answer
    until(asked, 1);
    return Finalize(0, own_role(), false);
  }
  app.set_request_handle([&](const SimpleData &r, SimpleApp *self) {
    self->Response(r);
    asked++;
  });
  for (int i = 0; IsServer() && !asked; i++) {
    app.Request(i, "", 9);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (IsWorker()) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THROW(fserver::PeerLostError,
                 "worker 1 is gone, and has not answered",
                 app.Wait(app.Request(0, "", 11)));
    EXPECT(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
    EXPECT(asked.load() > 0);
    app.Wait(app.Request(0, "", 8));
  }
  try {
    Finalize(0, own_role());
  } catch (const fserver::PeerLostError &) { // of worker 1
  }
}

// A receiver that leaves in Finalize, alone, and has not answered: Wait throws. What it has answered counts, also if
// that is handled later.
BARE_SCENE(a_receiver_leaves, 1, 1) {
  if (own_role() == Node::WORKER)
    setenv("FSERVER_STOP_TIMEOUT", "1", 1);
  StartPS(0, own_role(), -1, true);
  std::atomic<int> asked{0}, answered{0};
  SimpleApp app(0, 0);
  if (IsWorker()) {
    app.set_request_handle([&](const SimpleData &r, SimpleApp *self) {
      if (r.head == 1)
        self->Response(r, "answer");
      asked++;
    });
    until(asked, 2);
    EXPECT_THROW(fserver::TimeoutError, "", Finalize(0, own_role()));
    return;
  }
  if (IsServer()) {
    app.set_response_handle([&](const SimpleData &, SimpleApp *) {
      std::this_thread::sleep_for(std::chrono::seconds(3));
      answered++;
    });
    const int first = app.Request(1, "", 9), second = app.Request(0, "", 9);
    EXPECT_THROW(fserver::PeerLostError,
                 "worker 0 is gone, and has not answered", app.Wait(second));
    EXPECT_EQ(answered.load(), 0);
    app.Wait(first);
    EXPECT_EQ(answered.load(), 1);
    EXPECT(Postoffice::Get()->GetDeadNodes().empty());
  }
  Finalize(0, own_role());
}

// The scheduler sees it too.
BARE_SCENE(a_receiver_leaves_the_scheduler, 1, 1) {
  StartPS(0, own_role(), -1, true);
  std::atomic<int> asked{0}, answered{0};
  SimpleApp app(0, 0);
  if (IsWorker()) {
    app.set_request_handle([&](const SimpleData &r, SimpleApp *self) {
      if (r.head == 1)
        self->Response(r);
      asked++;
    });
    until(asked, 2);
  }
  if (IsScheduler()) {
    app.set_response_handle([&](const SimpleData &, SimpleApp *) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      answered++;
    });
    const int yes = app.Request(1, "", 9), no = app.Request(0, "", 9);
    app.Wait(yes);
    EXPECT_EQ(answered.load(), 1);
    EXPECT_THROW(fserver::PeerLostError,
                 "worker 0 is gone, and has not answered", app.Wait(no));
  }
  Finalize(0, own_role());
}

// Closing the node ends what waits.
BARE_SCENE(closed_while_it_waits, 1, 1) {
  StartPS(0, own_role(), -1, true);
  SimpleApp app(0, 0);
  std::atomic<int> asked{0};
  if (IsServer())
    app.set_request_handle(
        [&](const SimpleData &, SimpleApp *) { asked++; }); // no answer
  if (IsWorker()) {
    const int t = app.Request(0, "", 8);
    std::thread waits(
        [&] { EXPECT_THROW(fserver::ClosedError, "", app.Wait(t)); });
    Finalize(0, own_role(), false);
    waits.join();
    EXPECT_THROW(fserver::ClosedError, "", app.Wait(app.Request(0, "", 8)));
    EXPECT_THROW(fserver::ClosedError, "", SimpleApp(1, 0));
    return;
  }
  try {
    Finalize(0, own_role());
  } catch (const fserver::PeerLostError &) { // the worker has just gone
  }
}
