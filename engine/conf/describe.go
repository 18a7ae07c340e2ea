package conf

import "encoding/json"

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
//	{"settings": [...], "unknown": [{"name", "nearest"}], "warnings": ["..."], "errors": ["..."]}
//
// It never shows a secret.
func Describe(settings []string) []byte {
	p := parse(settings)
	out := struct {
		Settings []description `json:"settings"`
		Unknown  []unknown     `json:"unknown"`
		Warnings []Warning     `json:"warnings"`
		Errors   []string      `json:"errors"`
	}{Unknown: append([]unknown{}, p.unknown...), Warnings: append([]Warning{}, p.warnings...), Errors: []string{}}
	for _, err := range p.errs {
		out.Errors = append(out.Errors, err.Error())
	}
	section := ""
	for _, s := range table {
		if s.section != "" {
			section = s.section
		}
		d := description{
			Name: s.name, Section: section, Type: s.typ, Allowed: s.want, Default: s.fallback(),
			Effect: s.effect, Meaning: s.meaning, Value: s.get(&p.cfg), Source: "default",
		}
		for _, o := range s.older {
			d.Older = append(d.Older, o.name)
		}
		if by := p.source[s.name]; by != "" {
			d.Source = by
		}
		out.Settings = append(out.Settings, d)
	}
	b, _ := json.Marshal(out) // strings only: cannot fail
	return b
}

// fallback is what holds when no value is given.
func (s *setting) fallback() string {
	if s.def != "" {
		return s.def
	}
	return s.unset
}
