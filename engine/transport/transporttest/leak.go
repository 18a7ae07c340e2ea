package transporttest

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// leaks is what a process holds: goroutines by count, descriptors by what they
// name.
type leaks struct {
	goroutines int
	files      map[string]string // number -> target
}

// wakePoller makes the runtime open the descriptors of its own poller, which it
// keeps for good.
var wakePoller = sync.OnceFunc(func() {
	r, w, err := os.Pipe()
	if err != nil {
		return
	}
	r.Close()
	w.Close()
})

func countLeaks(tb testing.TB) leaks {
	wakePoller()
	files, err := openFiles()
	if err != nil {
		tb.Fatalf("count descriptors: %v", err)
	}
	return leaks{runtime.NumGoroutine(), files}
}

// check fails the test when there is more than there was. A goroutine that has
// done its last work may need a moment to leave.
func (l leaks) check(tb testing.TB) {
	looks := 0
	for end := time.Now().Add(patience); runtime.NumGoroutine() > l.goroutines; looks++ {
		Rest(looks)
		if time.Now().After(end) {
			buf := make([]byte, 1<<20)
			tb.Errorf("%d goroutines before, %d after:\n%s", l.goroutines,
				runtime.NumGoroutine(), buf[:runtime.Stack(buf, true)])
			break
		}
	}
	files, err := openFiles()
	if err != nil {
		tb.Errorf("count descriptors: %v", err)
	}
	for n, target := range files {
		if l.files[n] != target {
			tb.Errorf("descriptor %s is left open: %s", n, target)
		}
	}
}

func openFiles() (map[string]string, error) {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("transporttest: %w", err)
	}
	files := map[string]string{}
	for _, e := range entries {
		// The descriptor of this very listing is gone by now.
		// Those of a GPU's driver are its own affair.
		if target, err := os.Readlink(dir + "/" + e.Name()); err == nil && !strings.HasPrefix(target, "/dev/nvidia") {
			files[e.Name()] = target
		}
	}
	return files, nil
}
