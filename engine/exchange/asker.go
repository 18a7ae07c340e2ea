package exchange

// WorkerOf is the rank of the worker whose request has a handler. Safe from any goroutine.
func (s *Server) WorkerOf(handler uint64) (rank int32, err error) {
	if !s.requests.ask(handler, func(r *Request) { rank = r.client.rank }) {
		err = Shapef("exchange: worker_of handler %d: no such request is waiting for an answer (ask before respond)", handler)
	}
	return rank, err
}

// PullKeys copies the keys of the pull tensors of the request with a handler to keys, as many as fit, and gives their
// number. Safe from any goroutine.
func (s *Server) PullKeys(handler uint64, keys []uint64) (n int, err error) {
	copyKeys := func(r *Request) {
		n = len(r.pull)
		for i := range min(len(keys), n) {
			keys[i] = r.pull[i].key
		}
	}
	if !s.requests.ask(handler, copyKeys) {
		err = Shapef("exchange: pull_keys handler %d: no such request is waiting for an answer (ask before respond)", handler)
	}
	return n, err
}

// Losses is how often the worker with a rank was lost. What the application keeps for it is of no use to the process
// that takes its place. Safe from any goroutine.
func (s *Server) Losses(rank int32) (uint32, error) {
	if s.ranked.Load() {
		for _, c := range s.clients {
			if c.rank == rank {
				return c.life.Load(), nil
			}
		}
	}
	return 0, Shapef("exchange: losses: worker %d is not one of this server's", rank)
}
