package peers

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/wire"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata")

// TestScripts runs the transcripts in testdata. A line that starts at the margin is a command,
// what the machine asks for follows indented, and its state where that has changed.
//
//	worker [wait=30s]      a machine of a worker, for its server; calls wait for a successor
//	server [wait=30s]      one of a server, for its worker
//	named present|gone|left EPOCH [late]
//	successor EPOCH
//	gone, again, connected [heard], heard, flushed, bye, down, failed [other], running, leaving
//	after 3s               time passes, up to when the machine is due and further
//	judge EPOCH...         what becomes of connections of runs with these epochs
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			require.NoError(t, err)
			got := play(t, string(want))
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
				return
			}
			require.Equal(t, string(want), got)
		})
	}
}

var kinds = map[string]Kind{
	"gone": Gone, "again": Again, "connected": Connected, "heard": Heard, "flushed": Flushed, "bye": Bye,
	"down": Down, "failed": Failed, "running": Running, "leaving": Leaving,
}

var states = map[string]wire.State{"present": wire.Present, "gone": wire.Gone, "left": wire.Parting}

// player is a machine under a transcript.
type player struct {
	t    *testing.T
	p    Peer
	now  int64
	text strings.Builder
}

func play(t *testing.T, script string) string {
	w := &player{t: t, now: int64(time.Hour)}
	for line := range strings.Lines(script) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(line, "\t") {
			continue
		}
		w.text.WriteString(line + "\n")
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Fields(line)
		w.command(f[0], f[1:])
	}
	return w.text.String()
}

func (w *player) command(name string, args []string) {
	kind, simple := kinds[name]
	switch {
	case name == "worker" || name == "server":
		cfg := Config{Dials: name == "worker"}
		if len(args) != 0 {
			cfg.Waits, cfg.Limit = true, w.duration(strings.TrimPrefix(args[0], "wait="))
		}
		w.p = New(cfg)
	case name == "named" && len(args) > 1:
		m := &wire.Member{State: states[args[0]], Epoch: w.number(args[1])}
		w.step(Input{Kind: Named, Member: m, Late: slices.Contains(args, "late"), Err: errors.New(name)})
	case name == "successor":
		w.step(Input{Kind: Succeeded, Member: &wire.Member{Epoch: w.number(args[0])}, Err: errors.New(name)})
	case name == "after":
		end := w.now + int64(w.duration(args[0]))
		for w.p.Next() <= end {
			w.now = w.p.Next()
			w.step(Input{Kind: Tick})
		}
		w.now = end
		w.step(Input{Kind: Tick})
	case name == "judge":
		for _, a := range args {
			v := [...]string{"wait", "admit", "past", "missed"}[w.p.Judge(w.number(a))]
			fmt.Fprintf(&w.text, "\t%s: %s\n", a, v)
		}
	case simple:
		w.step(Input{Kind: kind, Heard: slices.Contains(args, "heard"), Other: slices.Contains(args, "other"), Err: errors.New(name)})
	default:
		require.Fail(w.t, "no such command", "%s %v", name, args)
	}
}

func (w *player) step(in Input) {
	was := w.p.State()
	for _, o := range w.p.Step(w.now, in) {
		fmt.Fprintf(&w.text, "\t%s\n", describe(o))
	}
	if is := w.p.State(); is != was {
		fmt.Fprintf(&w.text, "\t-> %v\n", is)
	}
}

func describe(o Output) string {
	s := [...]string{"dial", "stop", "close", "greet", "begin", "part", "lose", "give up", "say bye", "fail", "warn"}[o.Do]
	if o.After != 0 {
		s += fmt.Sprintf(" after %v", o.After)
	}
	if o.Again {
		s += " again"
	}
	if o.Err != nil {
		s += ": " + o.Err.Error()
	}
	return s
}

func (w *player) duration(s string) time.Duration {
	d, err := time.ParseDuration(s)
	require.NoError(w.t, err)
	return d
}

func (w *player) number(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	require.NoError(w.t, err)
	return n
}
