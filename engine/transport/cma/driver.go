package cma

import (
	"fserver/engine/conf"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Driver opens connections between processes of one host.
var Driver = transport.Driver{
	Way: conf.Way{Name: "cma", About: "inside a host, from process to process", Options: []conf.Option{
		conf.Choice[Mode]("FSERVER_CMA", "auto", []string{"auto", "direct", "staged"},
			"how the transport cma writes into a peer's memory. `direct` copies once; `staged` copies twice, through shared memory; `auto` takes `direct` where the kernel permits it to both sides, and otherwise `staged`, with a warning that says why"),
		conf.Flag("FSERVER_PTRACER", "1",
			"whether the process permits other processes of its user to write into its memory (PR_SET_PTRACER) where the kernel permits that to parents only (kernel.yama.ptrace_scope=1). `cma` needs this to copy directly"),
	}},
	Inside: true,
	Probe:  findings,
	Open: func(e *transport.Env) ([]transport.Fabric, error) {
		o, err := link.From(e)
		if err != nil {
			return nil, err
		}
		f, err := Open(Options{Options: o, Mode: conf.Get[Mode](e.Config, "FSERVER_CMA"), NoPtracer: !conf.Get[bool](e.Config, "FSERVER_PTRACER")})
		if err != nil {
			return nil, err
		}
		return []transport.Fabric{f}, nil
	},
}

// findings says how writes travel, which depends on what the kernel permits between two processes.
func findings(c *conf.Config) []transport.Finding {
	f := transport.Finding{
		State: transport.Yes, Text: "one copy", Test: transport.WritesPermittedMemory,
		Fails: transport.Note, Else: "two copies through shared memory",
	}
	if !conf.Get[bool](c, "FSERVER_PTRACER") {
		f.Test, f.Remedy = transport.WritesMemory, "unset FSERVER_PTRACER"
	}
	switch conf.Get[Mode](c, "FSERVER_CMA") {
	case Direct:
		f.Fails, f.Else = transport.No, "FSERVER_CMA=direct cannot be had"
	case Staged:
		f = transport.Finding{State: transport.Yes, Text: f.Else + " (FSERVER_CMA=staged)"}
	}
	return []transport.Finding{f}
}
