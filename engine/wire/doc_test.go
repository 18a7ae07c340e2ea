package wire

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestWirePage checks that docs/wire.md is of this version, has a row for each type of frame and
// message and for no other, and a heading with the fields of each frame that has some.
func TestWirePage(t *testing.T) {
	text, err := os.ReadFile("../../docs/wire.md")
	require.NoError(t, err)
	page := string(text)
	require.True(t, strings.HasPrefix(page, fmt.Sprintf("# Wire format, version %d\n", Version)), "the title names the version")

	types := map[string]string{} // name by number
	constant := regexp.MustCompile(`(?m)^\tType(\w+)\s+Type = (\d+) `)
	for _, file := range []string{"codec.go", "hello.go"} {
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range constant.FindAllStringSubmatch(string(source), -1) {
			types[m[2]] = m[1]
		}
	}
	require.Equal(t, "Register", types["1"])
	rows := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\| (\d+) \| ([A-Z]\w+) \|`).FindAllStringSubmatch(page, -1) {
		require.NotContains(t, rows, m[1])
		rows[m[1]] = m[2]
	}
	require.Equal(t, types, rows)

	fields := func(frame []byte) {
		if name := types[fmt.Sprint(frame[0])]; len(frame) > 1 {
			require.Contains(t, page, "\n### "+name+"\n")
		}
	}
	for _, c := range control {
		fields(c.frame)
	}
	for _, c := range data {
		fields(c.frame)
	}
}
