package node

import (
	"bufio"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLogWithoutReader: a pipe that nobody reads stops nobody who logs, and the next reader is told what is lost.
func TestLogWithoutReader(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer func(was *os.File) { os.Stderr = was }(os.Stderr)
	os.Stderr = w
	line := strings.Repeat("x", 99) + "\n"
	var e stderr
	for range 2000 { // a pipe takes 64 KiB
		n, err := e.Write([]byte(line))
		require.NoError(t, err)
		require.Equal(t, len(line), n)
	}
	lost := e.dropped
	require.NotZero(t, lost)
	got := make(chan []string)
	go func() {
		var lines []string
		for s := bufio.NewScanner(r); s.Scan(); {
			lines = append(lines, s.Text())
		}
		got <- lines
	}()
	for e.dropped != 0 {
		_, err := e.Write([]byte("the last line\n"))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	lines := <-got
	require.Contains(t, lines[len(lines)-2], "lines of the log are lost: nobody read standard error")
	require.Equal(t, "the last line", lines[len(lines)-1])
	require.Less(t, len(lines), 2000)
}

// TestLogToAClosedFile: what cannot be asked whether it takes a line says what is wrong.
func TestLogToAClosedFile(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	require.NoError(t, r.Close())
	require.NoError(t, w.Close())
	defer func(was *os.File) { os.Stderr = was }(os.Stderr)
	os.Stderr = w
	var e stderr
	_, err = io.WriteString(&e, "a line\n")
	require.ErrorIs(t, err, os.ErrClosed)
}
