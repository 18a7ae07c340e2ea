package node

import (
	"fmt"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"fserver/engine/conf"
)

func logger(cfg *conf.Config) *zap.Logger {
	level := [...]zapcore.Level{zap.ErrorLevel, zap.WarnLevel, zap.InfoLevel, zap.DebugLevel}[cfg.Log]
	enc := zap.NewDevelopmentEncoderConfig()
	enc.CallerKey, enc.StacktraceKey, enc.NameKey = "", "", "node"
	core := zapcore.NewCore(zapcore.NewConsoleEncoder(enc), &standardError, level)
	name := cfg.Role.String()
	if cfg.Role != conf.Scheduler && cfg.Rank != conf.NoRank {
		name = fmt.Sprintf("%s %d", name, cfg.Rank)
	}
	return zap.New(core).Named(name)
}

// logLimit is how long a line of the log waits for a reader of standard error.
const logLimit = 100 * time.Millisecond

// pipePiece is what can be written to a pipe that poll calls writable.
const pipePiece = 4096

var standardError stderr

// stderr is where the log goes. The descriptor is looked up at each line, so
// that a caller who puts another file in its place is respected. A caller of the log may hold the token, and a pipe or a
// terminal may have no reader. So a line waits for at most logLimit, and is then dropped. Later lines do not wait until
// there is room again. Then a line says how many were dropped.
type stderr struct {
	mu      sync.Mutex
	dropped int
}

// Write implements zapcore.WriteSyncer. It takes all of b, or drops what is left of it.
func (e *stderr) Write(b []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	limit := logLimit
	if e.dropped != 0 {
		limit = 0
		if !writable(os.Stderr, 0) {
			e.dropped++
			return len(b), nil
		}
		fmt.Fprintf(os.Stderr, "fserver: %d lines of the log are lost: nobody read standard error\n", e.dropped)
		e.dropped = 0
	}
	for rest := b; len(rest) != 0; {
		if !writable(os.Stderr, limit) {
			e.dropped++
			break
		}
		n, err := os.Stderr.Write(rest[:min(len(rest), pipePiece)])
		if err != nil {
			return len(b) - len(rest) + n, err
		}
		rest = rest[n:]
	}
	return len(b), nil
}

// Sync implements zapcore.WriteSyncer.
func (*stderr) Sync() error { return nil }

// writable reports whether f has room, which it waits for until limit. If f cannot be asked, the answer is yes: the write
// then says what is wrong.
func writable(f *os.File, limit time.Duration) (ok bool) {
	conn, err := f.SyscallConn()
	if err != nil {
		return true
	}
	ok = true
	_ = conn.Control(func(fd uintptr) {
		end := time.Now().Add(limit)
		for {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
			n, err := unix.Poll(fds, int(max(0, time.Until(end)).Milliseconds()))
			if err != unix.EINTR {
				ok = n != 0
				return
			}
		}
	})
	return ok
}
