package conf

import (
	"fmt"
	"slices"
	"strings"
)

// Auto is the FSERVER_TRANSPORT that takes the best transport that reaches the peer.
const Auto = "auto"

// Way is what settings know of a transport. Its driver gives it.
type Way struct {
	Name    string   // a value of FSERVER_TRANSPORT
	Aliases []string // values of its older spellings that mean this transport
	About   string   // what it is for, as the documentation says it
	Options []Option
}

// Chosen says whether c has an option of the transport other than by default.
func (w *Way) Chosen(c *Config) bool {
	return slices.ContainsFunc(w.Options, func(o Option) bool { return o.get(c) != o.def })
}

// Flag makes an option of a transport that is on or off. Get gives it as a bool.
func Flag(name, def, meaning string) Option { return flag(name, def, kept[bool](name), meaning) }

// Number makes an option that is a whole number from lo to hi. Get gives it as an int.
func Number(name, def string, lo, hi int, meaning string) Option {
	return number(name, def, lo, hi, kept[int](name), meaning)
}

// Choice makes an option that is one of names. Get gives it as a T, the index of the name.
func Choice[T ~uint8](name, def string, names []string, meaning string) Option {
	return choice(name, def, names, kept[T](name), meaning)
}

// Names makes an option that is 1 to most different names, separated by commas. Get gives it as a []string; empty: it
// is not set.
func Names(name string, most int, meaning string) Option {
	const longest = 64
	want := fmt.Sprintf("1 to %d different names, each of at most %d visible ASCII characters without spaces, separated by commas", most, longest)
	return names(name, "names", want, kept[[]string](name), most, func(n string) bool { return visible(n, longest) }, meaning).or("chosen")
}

// Else gives o an older name, which takes the same values.
func (o Option) Else(name string) Option { return o.older(Spelling{Name: name}) }

// Get is the value of an option of a transport. T is what the constructor of the option says.
func Get[T any](c *Config, name string) T { return *kept[T](name)(c) }

// kept finds the place of an option's value.
func kept[T any](name string) func(*Config) *T {
	return func(c *Config) *T {
		if c.options == nil {
			c.options = map[string]any{}
		}
		v, ok := c.options[name].(*T)
		if !ok {
			v = new(T)
			c.options[name] = v
		}
		return v
	}
}

// rows is the table with the rows of the transports.
func rows(ways []Way) []Option {
	var all []Option
	add := func(section string, options ...Option) {
		for _, o := range options {
			o.section = section
			all = append(all, o)
		}
	}
	for _, t := range table {
		if t.section != "Transport and device" {
			add(t.section, t.options...)
			continue
		}
		add(t.section, way(ways))
		add(t.section, t.options...)
		for _, w := range ways {
			add("Transport "+w.Name, w.Options...)
		}
	}
	return all
}

// way is FSERVER_TRANSPORT. It takes every word: what no transport has for a name
// is for parser.transport to refuse, unless a newer spelling overrides it.
func way(ways []Way) Option {
	meaning := "transport of tensors. `auto` takes the best one that reaches the peer"
	for _, w := range ways {
		meaning += "; `" + w.Name + "`: " + w.About
	}
	read := func(v string) (string, bool) { return strings.ToLower(v), visible(v, 32) }
	at := func(c *Config) *string { return &c.Transport }
	return option("FSERVER_TRANSPORT", "choice", wanted(ways), Auto, at, read, same, meaning).older(older(ways)...)
}

func wanted(ways []Way) string {
	names := []string{Auto}
	for _, w := range ways {
		names = append(names, w.Name)
	}
	return oneOf(names)
}

// older are the spellings of FSERVER_TRANSPORT that ps-lite and StepMesh have.
func older(ways []Way) []Spelling {
	var said []string
	for _, w := range ways {
		if len(w.Aliases) > 0 {
			said = append(said, strings.Join(w.Aliases, ", ")+" (all mean "+w.Name+")")
		}
	}
	vans := strings.Join(said, "; ")
	named := func(v string) (string, bool) {
		for _, w := range ways {
			if slices.ContainsFunc(w.Aliases, func(a string) bool { return strings.EqualFold(a, v) }) {
				return w.Name, true
			}
		}
		return v, true
	}
	ucx := func(v string) (string, bool) {
		on, ok := onOff(v)
		if on {
			return "ucx", ok
		}
		return "", ok
	}
	return []Spelling{{"DMLC_ENABLE_RDMA", vans, named}, {"DMLC_ENABLE_UCX", switches, ucx}, {"DMLC_PS_VAN_TYPE", vans, named}}
}
