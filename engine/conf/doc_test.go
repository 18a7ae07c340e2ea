package conf

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write docs/settings.md from the table")

// TestSettingsPage keeps docs/settings.md the same as the table:
//
//	go test ./engine/conf -run TestSettingsPage -update
func TestSettingsPage(t *testing.T) {
	const path = "../../docs/settings.md"
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(page()), 0o644))
	}
	have, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, page(), string(have),
		"docs/settings.md is not up to date: go test ./engine/conf -run TestSettingsPage -update")
}

func page() string {
	var b strings.Builder
	b.WriteString(`# Settings

<!-- Generated from the table in engine/conf: go test ./engine/conf -run TestSettingsPage -update -->

Settings come from the environment, or from keyword arguments in Python, which
come first. ` + "`fserver env`" + ` prints those in force.

- White space around a value does not count. An empty value is as good as none,
  except that of a secret, which is an error.
- A setting that is on or off takes 0 or ` + "`off`, and 1 or `on`" + `.
- Where a setting has an older spelling, the newer one counts if both are given;
  if they disagree, a warning names both. Both have to be valid.
- A name that starts with ` + "`DMLC_`, `STEPMESH_` or `FSERVER_`" + ` and is not here is
  warned of once, with the nearest name that is; one that starts with ` + "`PS_`,\n  `BYTEPS_` or `STEPAF_`" + ` if it is at most two letters from such a name, and one
  with a letter wrong in a longer prefix (` + "`FSEVER_SECRET`" + `) if the rest is right. A value
  that is not allowed is an error; all errors are reported together.
- A setting that "takes effect with" something is read and checked by every build,
  and changes nothing where that is not in use. This build has the transports
  tcp and cma, and GPU tensors over both; cudaipc is cma with GPU memory mapped.
`)
	for _, s := range table {
		if s.section != "" {
			fmt.Fprintf(&b, "\n## %s\n\n| name | values | default | meaning |\n|---|---|---|---|\n", s.section)
		}
		meaning := strings.ToUpper(s.meaning[:1]) + s.meaning[1:] + "."
		if s.effect != "" {
			meaning += " Takes effect with: " + s.effect + "."
		}
		names := "`" + s.name + "`"
		for _, o := range s.older {
			names += ", older: `" + o.name + "`"
			if o.want != "" {
				names += " (" + o.want + ")"
			}
		}
		def := s.unset
		if s.def != "" {
			def = "`" + s.def + "`"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", names, s.want, def, meaning)
	}
	return b.String()
}
