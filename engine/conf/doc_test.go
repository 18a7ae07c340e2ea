package conf_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/conf"
	"fserver/engine/transport/all"
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

Every setting is an environment variable. Most are also arguments of ` + "`Worker`, `Server` and `Scheduler`" + ` ([API](api/fserver.md)),
and ` + "`settings={...}`" + ` there takes all of them by name. An argument takes precedence over the environment,
also over another setting there that would leave it without effect.

` + "```sh\nfserver env --set                      # the settings that are set, and where each comes from\nfserver env FSERVER_TRANSPORT=tcp      # tries a value\n```" + `

- A setting that is on or off takes 0 or ` + "`off`, and 1 or `on`" + `.
- White space around a value is ignored. An empty value counts as not set, except for a secret, where it is an error.
- A value that is not allowed is an error. All errors are reported together.
- If both a setting and its older spelling are set, the setting counts. If they disagree, a warning names both. Both must be valid.
- An unknown name that starts with ` + "`DMLC_`, `STEPMESH_` or `FSERVER_`" + ` causes one warning, with the nearest known name. For
  ` + "`PS_`, `BYTEPS_` and `STEPAF_`" + ` this is so if the name is at most two letters from a known one, and for a prefix with one
  wrong letter (` + "`FSEVER_SECRET`" + `) if the rest is right.
- A name in ` + "`settings`" + ` that is misspelt is an error, and a value of None there is as if the name were not given.
- A setting that "takes effect with" something is always checked, and otherwise changes nothing.
`)
	section := ""
	for _, s := range conf.Rows(all.Ways()) {
		if s.Section() != section {
			section = s.Section()
			fmt.Fprintf(&b, "\n## %s\n\n| name | values | default | meaning |\n|---|---|---|---|\n", section)
		}
		meaning := strings.ToUpper(s.Meaning[:1]) + s.Meaning[1:] + "."
		if s.Effect != "" {
			meaning += " Takes effect with: " + s.Effect + "."
		}
		names := "`" + s.Name + "`"
		for _, o := range s.Older {
			names += ", older: `" + o.Name + "`"
			if o.Want != "" {
				names += " (" + o.Want + ")"
			}
		}
		def, literal := s.Fallback()
		if literal {
			def = "`" + def + "`"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", names, s.Want(), def, meaning)
	}
	return b.String()
}
