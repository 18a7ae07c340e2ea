package engine_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "fserver/engine/"

// The imports that each package of the engine may have among the others. A
// package that is not here does not exist. transport/* are siblings: none
// imports another, and only node imports them.
var layers = map[string][]string{
	"conf":                      {},
	"mem":                       {},
	"wire":                      {},
	"trace":                     {},
	"transport":                 {"mem"},
	"transport/transporttest":   {"mem", "transport"},
	"transport/cma":             {"mem", "transport"},
	"transport/cudaipc":         {"mem", "transport"},
	"transport/cudaipc/fakegpu": {"mem"},
	"transport/inproc":          {"mem", "transport"},
	"transport/lossy":           {"mem", "transport"},
	"transport/tcp":             {"mem", "transport"},
	"transport/verbs":           {"mem", "transport"},
	"topo":                      {"conf"},
	"cluster":                   {"wire"},
	"exchange":                  {"mem", "trace", "transport", "wire"},
	"node": {
		"cluster", "conf", "exchange", "mem", "topo", "trace", "transport",
		"transport/cma", "transport/cudaipc", "transport/inproc", "transport/lossy", "transport/tcp", "wire",
	},
	"cabi": {"conf", "mem", "node"},
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
	var all []source
	set := token.NewFileSet()
	require.NoError(t, filepath.WalkDir(".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || path.Dir(name) == "." || path.Ext(name) != ".go" {
			return err
		}
		file, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
		all = append(all, source{name, path.Dir(name), strings.HasSuffix(name, "_test.go"), file})
		return err
	}))
	require.NotEmpty(t, all)
	return all
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

// The engine is a guest in somebody's process: settings come through the C
// ABI, and nothing in it ends the process.
func TestLeavesTheProcessAlone(t *testing.T) {
	banned := []string{
		"os.Environ", "os.Getenv", "os.LookupEnv", "os.ExpandEnv", "os.Exit",
		"log.Fatal", "log.Fatalf", "log.Fatalln", "signal.Notify",
	}
	for _, s := range sources(t) {
		if s.test {
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
	"node/panic.go":              1, // spawn
	"transport/tcp/tcp.go":       1, // task
	"transport/cma/cma.go":       1, // task
	"transport/cudaipc/later.go": 1, // a chore at a time, in try
	"transport/verbs/verbs.go":   1, // task
}

func TestGoroutinesAreKnown(t *testing.T) {
	found := map[string]int{}
	for _, s := range sources(t) {
		if s.test || s.pkg == "transport/transporttest" || s.pkg == "transport/cudaipc/fakegpu" {
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

// Each export turns a panic into an error before it does anything else.
func TestExportsAreGuarded(t *testing.T) {
	constant := []string{"fs_abi", "fs_now"}
	exports := 0
	for _, s := range sources(t) {
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || s.pkg != "cabi" || !strings.HasPrefix(f.Name.Name, "fs_") || slices.Contains(constant, f.Name.Name) {
				continue
			}
			exports++
			first, ok := f.Body.List[0].(*ast.DeferStmt)
			require.True(t, ok, f.Name.Name)
			guard, ok := first.Call.Fun.(*ast.Ident)
			require.True(t, ok && guard.Name == "guard", f.Name.Name)
		}
	}
	require.Greater(t, exports, 30)
}
