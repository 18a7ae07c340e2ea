package transport

import (
	"go.uber.org/zap"

	"fserver/engine/conf"
)

// A Driver is a way that bytes can travel, before a device of it is opened.
type Driver struct {
	conf.Way // its name and settings
	// Over names the driver whose connections this one travels over; empty: its own.
	Over string
	// Inside says that it reaches processes of this host alone: BYTEPS_ENABLE_IPC=0 excludes it
	// where it is not named.
	Inside bool
	// Absent says that this host has no device that `auto` would use with these settings, so that nobody needs to be
	// told why it is not used. Nil: there is always one.
	Absent func(*conf.Config) bool
	// Named says whether the settings name the devices. Those that they do not name are used, with `auto`, only
	// between two that have a network in common. Nil: it has no devices that can be named.
	Named func(*conf.Config) bool
	// Plain says that it reaches other hosts and encrypts nothing: `auto` does not use it with FSERVER_TLS, nor, unless
	// devices are named, where the scheduler is on the loopback of this host.
	Plain bool
	// GPU says that it is for GPU tensors alone.
	GPU bool
	// Probe reports to the doctor what works on this host with these settings, and what does not and why. Nil: it reports
	// nothing.
	Probe func(*conf.Config) []Finding
	// Open opens a Fabric for each device that is to be used. One of several that does not work is a *Absent. It is
	// an *ErrUnavailable where none works, or is not to be used with these settings. Nil: see Wrap.
	Open func(*Env) ([]Fabric, error)
	// Strands says that the Fabrics are to be joined into one, and how many connections it has to a peer over
	// each of them. Nil: they are not.
	Strands func(*conf.Config) int
	// Wrap puts the driver around a Fabric of another one, or returns that Fabric if it has
	// nothing to do there. Nil: it wraps none. With an error, the Fabric is still the caller's.
	Wrap func(*Env, Fabric) (Fabric, error)
}

// Env is what a Driver is given.
type Env struct {
	Config *conf.Config
	Gate   Gate
	Log    *zap.Logger
	// Listen is where connections are taken, "host:port"; empty: none are. A driver that is
	// not the one that reaches everybody takes another port.
	Listen string
	// Bind is the address of this host to dial from; empty: any.
	Bind string
	// Host is the address of this host by which its devices are chosen; empty: none is known.
	Host string
	// Hosts are the addresses of the interfaces that the user named, or that `auto` uses, if there are several.
	Hosts []string
	// Nearest puts names of devices into the order in which they are to be tried, the nearest to the GPU of the node
	// first. It may take seconds. Nil: there is no GPU, or the user has said which interface is used.
	Nearest func(names []string) []string
	// One asks for the Fabric of one device, the first that works.
	One bool
	// Refused is told of each connection that was taken and is of no use; it may be called
	// by several goroutines at once.
	Refused func(remote string, err error)
	// Device is the GPU of the node, in the form that drivers for GPUs know; nil: none.
	Device any
}

// A Finding is what a Probe says of one thing.
type Finding struct {
	What   string `json:"what"`  // "library", "device rxe0"
	State  State  `json:"state"` // whether it can be used
	Text   string `json:"text"`
	Remedy string `json:"remedy"` // what the user can do, or empty
	// Test names a test with two processes, which the doctor runs. State and Text hold if it succeeds. Remedy helps where
	// only another Test would succeed. Empty: there is no test.
	Test Test `json:"test"`
	// Fails and Else take the place of State and Text where Test fails. With No, the transport cannot be used.
	Fails State  `json:"fails"`
	Else  string `json:"else"`
}

// Test is a test that the doctor runs with two processes of this user.
type Test string

// The tests: whether one process can write into the memory of another, and whether it can once that one has called
// prctl(PR_SET_PTRACER).
const (
	WritesMemory          Test = "process_vm_writev"
	WritesPermittedMemory Test = "process_vm_writev, PR_SET_PTRACER"
)

// State is a judgement.
type State string

// Judgements: it works; it works in a slower way; it does not work; a plain fact.
const (
	Yes  State = "yes"
	Note State = "note"
	No   State = "no"
	Info State = "info"
)
