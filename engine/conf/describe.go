package conf

import (
	"cmp"
	"encoding/json"
)

// description is one row of what Describe gives.
type description struct {
	Name    string   `json:"name"`
	Older   []string `json:"older,omitempty"` // older spellings, in order of precedence
	Section string   `json:"section"`
	Type    string   `json:"type"`
	Allowed string   `json:"allowed"`
	Default string   `json:"default"` // a value, or in words what it means that there is none
	Effect  string   `json:"takes_effect_with,omitempty"`
	Meaning string   `json:"meaning"`
	Value   string   `json:"value"`  // what is in force; "set" for a secret
	Source  string   `json:"source"` // the spelling that it comes from, or "default"
}

// Describe is JSON about every setting and, as far as they are right, about the
// values that settings give to them:
//
//	{"settings": [...], "unknown": [{"name", "nearest"}], "warnings": ["..."], "errors": ["..."], "missing": ["..."]}
//
// Errors is what Parse returns for a node with these settings. Missing holds those of them that only say
// that a setting is not given. It never shows a secret.
func Describe(settings []string, transports []Way) []byte {
	p := parse(settings, transports)
	out := struct {
		Settings []description `json:"settings"`
		Unknown  []unknown     `json:"unknown"`
		Warnings []Warning     `json:"warnings"`
		Errors   []string      `json:"errors"`
		Missing  []string      `json:"missing"`
	}{
		Unknown:  append([]unknown{}, p.unknown...),
		Warnings: append([]Warning{}, p.warnings...),
		Errors:   append([]string{}, p.errs...),
		Missing:  append([]string{}, p.missing...),
	}
	for _, s := range p.table {
		d := description{
			Name: s.Name, Section: s.section, Type: s.typ, Allowed: s.want, Default: cmp.Or(s.def, s.unset),
			Effect: s.Effect, Meaning: s.Meaning, Value: s.get(&p.cfg), Source: "default",
		}
		for _, o := range s.Older {
			d.Older = append(d.Older, o.Name)
		}
		if by := p.source[s.Name]; by != "" {
			d.Source = by
		}
		out.Settings = append(out.Settings, d)
	}
	b, _ := json.Marshal(out) // strings only: cannot fail
	return b
}
