package topo

import (
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// recorded unpacks a machine of testdata into a folder and gives the System
// that looks there. Its lines:
//
//	@ DIR                                     where the next paths begin
//	PATH: CONTENT                             a file; \n is a line break
//	PATH -> TARGET                            a link
//	PATH/                                     an empty folder
//	gpu: INDEX NAME UUID PCI MEMORY [TO:LANES]...
//	address: INTERFACE PREFIX
//	affinity: CORES
func recorded(t testing.TB, name string) System {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name+".txt"))
	require.NoError(t, err)
	root := t.TempDir()
	var gpus []GPU
	addrs := map[string][]netip.Prefix{}
	var cores []int
	dir := "/"
	put := func(path string) string {
		path = filepath.Join(root, dir, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		return path
	}
	for _, line := range strings.Split(string(b), "\n") {
		file, content, isFile := strings.Cut(line, ": ") // paths of PCI devices have colons too
		from, to, isLink := strings.Cut(line, " -> ")
		f := strings.Fields(content)
		switch {
		case line == "" || line[0] == '#':
		case strings.HasPrefix(line, "@ "):
			dir = line[2:]
		case isLink:
			require.NoError(t, os.Symlink(to, put(from)))
		case strings.HasSuffix(line, "/") && !isFile:
			require.NoError(t, os.MkdirAll(put(line), 0o755))
		case file == "gpu":
			g := GPU{Index: atoi(f[0]), Name: f[1], UUID: f[2], PCI: f[3], Memory: uint64(atoi(f[4]))}
			for _, l := range f[5:] {
				i := strings.LastIndex(l, ":")
				g.Links = append(g.Links, NVLink{l[:i], atoi(l[i+1:])})
			}
			gpus = append(gpus, g)
		case file == "address":
			addrs[f[0]] = append(addrs[f[0]], netip.MustParsePrefix(f[1]))
		case file == "affinity":
			cores = (&reader{}).cpus("affinity", content)
		default:
			require.True(t, isFile, line)
			require.NoError(t, os.WriteFile(put(file), []byte(strings.ReplaceAll(content, `\n`, "\n")+"\n"), 0o644))
		}
	}
	return System{
		Root:      root,
		GPUs:      func() ([]GPU, Driver) { return gpus, Driver{Version: "570.86.15"} },
		Addresses: func() (map[string][]netip.Prefix, error) { return addrs, nil },
		Affinity:  func() ([]int, error) { return cores, nil },
	}
}

func (h *Host) nicNamed(t testing.TB, name string) *NIC {
	t.Helper()
	for i := range h.NICs {
		if h.NICs[i].Name == name {
			return &h.NICs[i]
		}
	}
	require.Fail(t, "no interface "+name)
	return nil
}

func addr(s string) netip.Addr {
	a, _ := netip.ParseAddr(s)
	return a
}

func itoa(i int) string { return strconv.Itoa(i) }

func writeFile(name, text string) error { return os.WriteFile(name, []byte(text+"\n"), 0o644) }
