// Customer: who makes the requests of an app.
#pragma once

namespace ps {

class Customer {
public:
  Customer(int app_id, int customer_id)
      : app_id_(app_id), customer_id_(customer_id) {}
  int app_id() const { return app_id_; }
  int customer_id() const { return customer_id_; }

private:
  int app_id_, customer_id_;
};

} // namespace ps
