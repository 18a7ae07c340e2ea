package conf

import "cmp"

// What the settings' page is made of.

func Rows(ways []Way) []Option { return rows(ways) }

func (o Option) Section() string { return o.section }

func (o Option) Want() string { return o.want }

func (o Option) Fallback() (text string, literal bool) { return cmp.Or(o.def, o.unset), o.def != "" }
