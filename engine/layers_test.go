package engine_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport/all"
)

const module = "fserver/engine/"

// The imports that each package of the engine may have among the others. A
// package that is not here does not exist. transport/* are siblings: none
// imports another, and only node imports them.
var layers = map[string][]string{
	"conf":                    {},
	"mem":                     {},
	"wire":                    {},
	"trace":                   {},
	"gpu":                     {"mem", "transport"},
	"gpu/fakegpu":             {"mem"},
	"transport":               {"conf", "mem"},
	"transport/all":           {"conf", "transport", "transport/cma", "transport/cudaipc", "transport/tcp", "transport/verbs"},
	"transport/transporttest": {"mem", "transport"},
	"transport/transporttest/overtest": {
		"gpu/fakegpu", "mem", "transport", "transport/link/over", "transport/transporttest",
	},
	"transport/cma":       {"conf", "mem", "transport", "transport/link"},
	"transport/cudaipc":   {"conf", "gpu", "mem", "transport", "transport/link", "transport/link/over"},
	"transport/faults":    {"mem", "transport", "transport/link"},
	"transport/inproc":    {"transport", "transport/link"},
	"transport/link":      {"conf", "mem", "transport"},
	"transport/link/over": {"gpu", "transport", "transport/link"},
	"transport/rails":     {"mem", "transport", "transport/link"},
	"transport/stage":     {"gpu", "mem", "transport", "transport/link", "transport/link/over"},
	"transport/tcp":       {"conf", "mem", "transport", "transport/link"},
	"transport/verbs":     {"conf", "gpu", "mem", "transport", "transport/link"},
	"topo":                {"conf"},
	"channel":             {"mem", "wire"},
	"cluster":             {"wire"},
	"peers":               {"wire"},
	"exchange":            {"mem", "trace", "transport", "wire"},
	"progress":            {"trace", "transport"},
	"node": {
		"channel", "cluster", "conf", "exchange", "gpu", "mem", "peers", "progress", "topo", "trace", "transport",
		"transport/all", "transport/faults", "transport/rails", "transport/stage", "wire",
	},
	"cabi": {"conf", "gpu", "mem", "node"},
}

// source is one Go file of the engine, whatever its build tags.
type source struct {
	name string // "transport/tcp/conn.go"
	pkg  string // "transport/tcp"
	test bool
	file *ast.File
}

func sources(t *testing.T) []source {
	t.Helper()
	var found []source
	set := token.NewFileSet()
	require.NoError(t, filepath.WalkDir(".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || path.Dir(name) == "." || path.Ext(name) != ".go" {
			return err
		}
		file, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
		found = append(found, source{name, path.Dir(name), strings.HasSuffix(name, "_test.go"), file})
		return err
	}))
	require.NotEmpty(t, found)
	return found
}

func imports(t *testing.T, s source) []string {
	t.Helper()
	var paths []string
	for _, spec := range s.file.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		require.NoError(t, err)
		paths = append(paths, p)
	}
	return paths
}

func TestLayers(t *testing.T) {
	for _, s := range sources(t) {
		allowed, known := layers[s.pkg]
		require.True(t, known, "%s: package %s is not in the table", s.name, s.pkg)
		if s.test {
			continue // a test may put layers together
		}
		for _, p := range imports(t, s) {
			ours, found := strings.CutPrefix(p, module)
			require.True(t, !found || slices.Contains(allowed, ours),
				"%s: %s must not import %s", s.name, s.pkg, ours)
		}
	}
}

// TestLayersPage compares the table of packages in docs/architecture.md with layers.
func TestLayersPage(t *testing.T) {
	page, err := os.ReadFile("../docs/architecture.md")
	require.NoError(t, err)
	_, table, found := strings.Cut(string(page), "\n| package | what it is | imports |\n|---|---|---|\n")
	require.True(t, found)
	table, _, _ = strings.Cut(table, "\n\n")
	code := regexp.MustCompile("`([^`]+)`")
	names := func(cell string) []string {
		list := []string{}
		for _, m := range code.FindAllStringSubmatch(cell, -1) {
			list = append(list, m[1])
		}
		return list
	}
	rows := map[string][]string{}
	for row := range strings.Lines(table) {
		cells := strings.Split(row, "|")
		require.Len(t, cells, 5, row)
		for _, pkg := range names(cells[1]) {
			rows[pkg] = names(cells[3])
		}
	}
	require.Equal(t, layers, rows)
}

func TestUnsafeAndCgo(t *testing.T) {
	for _, s := range sources(t) {
		base := strings.TrimSuffix(strings.TrimSuffix(s.name, ".go"), "_test")
		for _, p := range imports(t, s) {
			if p == "unsafe" {
				require.True(t, strings.HasSuffix(base, "_unsafe"),
					"%s: unsafe belongs into a file named *_unsafe.go", s.name)
			}
			if p == "C" {
				require.Equal(t, "cabi", s.pkg, "%s: cgo belongs into cabi", s.name)
			}
		}
	}
}

// Nobody but a transport and the list of all names one, in strings too: what asks for a name would
// have to be found again for each new transport.
func TestTransportsAreNotNamed(t *testing.T) {
	var names []string
	for _, d := range all.Drivers() {
		names = append(names, d.Name)
	}
	word := regexp.MustCompile(`\b(` + strings.Join(names, "|") + `)\b`)
	for _, s := range sources(t) {
		if s.test || s.pkg == "transport/all" || strings.HasPrefix(s.pkg, "transport/transporttest") {
			continue
		}
		own, _ := strings.CutPrefix(s.pkg, "transport/")
		ast.Inspect(s.file, func(n ast.Node) bool {
			text, ok := n.(*ast.BasicLit)
			if !ok || text.Kind != token.STRING || text.Value == `"tcp"` && own == "link" { // of package net
				return true
			}
			for _, name := range word.FindAllString(text.Value, -1) {
				if name != own {
					t.Errorf("%s: %s names a transport", s.name, text.Value)
				}
			}
			return true
		})
	}
}

// The engine is a guest in somebody's process: settings come through the C
// ABI, and nothing in it ends the process.
func TestLeavesTheProcessAlone(t *testing.T) {
	banned := []string{
		"os.Environ", "os.Getenv", "os.LookupEnv", "os.ExpandEnv", "os.Exit",
		"log.Fatal", "log.Fatalf", "log.Fatalln", "signal.Notify",
	}
	for _, s := range sources(t) {
		if s.test || s.pkg == "transport/transporttest" {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok {
				if x, ok := sel.X.(*ast.Ident); ok {
					require.NotContains(t, banned, x.Name+"."+sel.Sel.Name, s.name)
				}
			}
			return true
		})
	}
}

// Where goroutines of the engine start. Each catches the panics of what it calls, and a
// test of the package has one panic in each that starts there.
var goroutines = map[string]int{
	"gpu/calls.go":              1, // the calls of the driver that may wait
	"gpu/later.go":              1, // a chore at a time, in try
	"progress/token.go":         1, // Spawn
	"transport/link/link.go":    1, // Task
	"transport/rails/fabric.go": 1, // task
}

func TestGoroutinesAreKnown(t *testing.T) {
	found := map[string]int{}
	for _, s := range sources(t) {
		if s.test || strings.HasPrefix(s.pkg, "transport/transporttest") || s.pkg == "gpu/fakegpu" {
			continue // of tests
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			switch v := n.(type) {
			case *ast.GoStmt:
				found[s.name]++
			case *ast.CallExpr:
				if sel, ok := v.Fun.(*ast.SelectorExpr); ok && sel.Sel.Name == "Go" {
					found[s.name]++ // of a WaitGroup
				}
			}
			return true
		})
	}
	require.Equal(t, goroutines, found)
}

// Each export turns a panic into an error before it does anything else: it begins with guard, or
// returns what call or on, which begin with guard, make of a function.
func TestExportsAreGuarded(t *testing.T) {
	unguarded := []string{"fs_abi", "fs_now"} // constants
	begins := map[string]string{}
	for _, s := range sources(t) {
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && s.pkg == "cabi" && !slices.Contains(unguarded, f.Name.Name) {
				begins[f.Name.Name] = firstCall(f.Body)
			}
		}
	}
	exports := 0
	for name, first := range begins {
		if strings.HasPrefix(name, "fs_") {
			exports++
			require.Contains(t, []string{"defer guard", "return call", "return on"}, first, name)
		}
	}
	require.Greater(t, exports, 30)
	require.Equal(t, []string{"defer guard", "defer guard"}, []string{begins["call"], begins["on"]})
}

// firstCall is the function that a body calls in its first statement, and how.
func firstCall(body *ast.BlockStmt) string {
	if len(body.List) == 0 {
		return ""
	}
	var how string
	var call ast.Expr
	switch first := body.List[0].(type) {
	case *ast.DeferStmt:
		how, call = "defer ", first.Call
	case *ast.ReturnStmt:
		if len(first.Results) == 1 {
			how, call = "return ", first.Results[0]
		}
	}
	if c, ok := call.(*ast.CallExpr); ok {
		if name, ok := c.Fun.(*ast.Ident); ok {
			return how + name.Name
		}
	}
	return ""
}
