package conf

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// Warning is something that the user should know and that stops nothing.
type Warning string

// minSecret is the length, in bytes, below which a secret is warned of: whoever
// has recorded one handshake can try secrets without asking anybody.
const minSecret = 16

// Parse reads settings, each "NAME=value". Names that are not ours are passed
// over, so a whole environment can be given.
//
//   - Of two entries with the same name the later one counts. An empty value is
//     as good as none, except that of a secret, which is an error.
//   - Of two spellings of one setting the newer one counts. If the older one
//     says something else, a warning names both: programs written for StepMesh
//     set the older names themselves, and the newer name has to override them.
//   - A name that looks like one of ours and is none is warned of once, with the
//     nearest known name.
//
// The transports are those that FSERVER_TRANSPORT can name.
//
// The error holds everything that is wrong, one line for each. Config is nil
// then.
func Parse(settings []string, transports []Way) (*Config, []Warning, error) {
	p := parse(settings, transports)
	if len(p.errs) > 0 {
		return nil, p.warnings, errors.New(strings.Join(p.errs, "\n"))
	}
	return &p.cfg, p.warnings, nil
}

// parser is one run of Parse.
type parser struct {
	ways     []Way
	table    []Option
	cfg      Config
	given    map[string]string // by name, as it was written
	source   map[string]string // of a setting: the spelling that counts, if any
	unknown  []unknown
	warnings []Warning
	errs     []string
	missing  []string // those of errs that only say that a setting is not given
}

func parse(settings []string, ways []Way) *parser {
	p := &parser{ways: ways, table: rows(ways), given: map[string]string{}, source: map[string]string{}}
	p.collect(settings)
	for i := range p.table {
		p.resolve(&p.table[i])
	}
	p.finish()
	return p
}

func (p *parser) warn(format string, args ...any) {
	p.warnings = append(p.warnings, Warning("conf: "+fmt.Sprintf(format, args...)))
}

func (p *parser) fail(format string, args ...any) {
	p.errs = append(p.errs, "conf: "+fmt.Sprintf(format, args...))
}

// lack fails because a setting is not given.
func (p *parser) lack(format string, args ...any) {
	p.fail(format, args...)
	p.missing = append(p.missing, p.errs[len(p.errs)-1])
}

// unknown is a name that looks like one of ours.
type unknown struct {
	Name    string `json:"name"`
	Nearest string `json:"nearest"` // known name
}

// collect fills given and warns of unknown names.
func (p *parser) collect(settings []string) {
	known := p.names()
	for i, s := range settings {
		name, v, ok := strings.Cut(s, "=")
		switch {
		case !ok:
			// What it says is not shown: it may be a misplaced secret.
			p.fail("setting %d of %d has no '=': want NAME=value", i+1, len(settings))
		case slices.Contains(known, name):
			p.given[name] = strings.TrimSpace(v)
		case ours(name, known) && !slices.ContainsFunc(p.unknown, func(u unknown) bool { return u.Name == name }):
			u := unknown{name, nearest(name, known)}
			p.unknown = append(p.unknown, u)
			p.warn("unknown setting %.64s has no effect (the nearest known name is %s)", u.Name, u.Nearest)
		}
	}
}

// ours says whether a name that is not known was meant to be. The prefixes that other
// programs use too count only next to a known name.
func ours(name string, known []string) bool {
	for _, prefix := range []string{"DMLC_", "STEPMESH_", "FSERVER_"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	for _, prefix := range []string{"PS_", "BYTEPS_", "STEPAF_"} {
		if strings.HasPrefix(name, prefix) && len(name) <= 64 {
			return distance(name, nearest(name, known)) <= 2
		}
	}
	return slipped(name, known)
}

// slipped reports whether a name is a known one with a misspelt prefix: one wrong letter in the
// prefix alone, or up to three in all, of which at most two in the prefix and none in its first
// letter. The latter needs a long rest, because other programs have settings that end in _LOG. The
// prefixes PS_ and SERVER_, a neighbour of FSERVER_, never count; DMLC_, which is short, counts
// before a long rest without a mistake.
func slipped(name string, known []string) bool {
	theirs, rest, _ := strings.Cut(name, "_")
	if theirs == "" || theirs == "SERVER" || len(name) > 64 {
		return false
	}
	for _, prefix := range []string{"FSERVER", "STEPMESH", "STEPAF", "BYTEPS", "DMLC"} {
		wrong, meant, short := distance(theirs, prefix), prefix+"_"+rest, prefix == "DMLC"
		alone := wrong == 1 && (!short || len(rest) >= 8) && slices.Contains(known, meant)
		inAll := wrong <= 2 && !short && len(rest) >= 5 && theirs[0] == prefix[0] && wrong+distance(meant, nearest(meant, known)) <= 3
		if alone || inAll {
			return true
		}
	}
	return false
}

// resolve gives one setting its value: that of the newest spelling that says
// something, else the default. All spellings are checked.
func (p *parser) resolve(s *Option) {
	if s.def != "" {
		s.set(&p.cfg, s.def)
	}
	chosen := ""
	for _, sp := range append([]Spelling{{Name: s.Name}}, s.Older...) {
		v, ok := p.given[sp.Name]
		if !ok || v == "" && !s.strict {
			continue
		}
		now, want := v, s.want
		if sp.To != nil {
			want = sp.Want
			if now, ok = sp.To(v); ok && now == "" {
				continue
			}
		}
		var try Config
		if !ok || !s.set(&try, now) {
			p.fail("%s: want %s", s.show(sp.Name, v), want)
			continue
		}
		switch said := s.get(&try); {
		case chosen == "":
			s.set(&p.cfg, now)
			chosen, p.source[s.Name] = said, sp.Name
		case said != chosen:
			newer := p.source[s.Name]
			p.warn("%s has no effect: %s is the newer spelling and says otherwise",
				s.show(sp.Name, v), s.show(newer, p.given[newer]))
		}
	}
}

// show is a setting as it was given, for messages.
func (s *Option) show(name, v string) string {
	if s.secret {
		return name
	}
	return fmt.Sprintf("%s=%.100q", name, v)
}

// finish derives what follows from several settings, and checks it.
func (p *parser) finish() {
	p.rank()
	p.scheduler()
	p.network()
	p.secret()
	p.tls()
	p.transport()
	p.heartbeats()
}

// heartbeats derives the one of the two settings that is not given from the other.
func (p *parser) heartbeats() {
	c := &p.cfg
	interval, timeout := p.source["PS_HEARTBEAT_INTERVAL"] != "", p.source["PS_HEARTBEAT_TIMEOUT"] != ""
	switch {
	case interval && !timeout:
		c.HeartbeatTimeout = max(c.HeartbeatTimeout, 10*c.HeartbeatInterval)
	case timeout && !interval && c.HeartbeatTimeout > 0:
		c.HeartbeatInterval = min(c.HeartbeatInterval, c.HeartbeatTimeout/4)
	case c.HeartbeatInterval > 0 && c.HeartbeatTimeout > 0 && c.HeartbeatTimeout <= c.HeartbeatInterval:
		p.fail("PS_HEARTBEAT_TIMEOUT is %v and PS_HEARTBEAT_INTERVAL is %v: want the time-out to be longer (0 turns either off)",
			c.HeartbeatTimeout, c.HeartbeatInterval)
	}
}

func (p *parser) rank() {
	c := &p.cfg
	if c.Role != Worker && c.Role != Server {
		c.Instance = 0
		return
	}
	groups, variable := c.Workers, "DMLC_NUM_WORKER"
	if c.Role == Server {
		groups, variable = c.Servers, "DMLC_NUM_SERVER"
	}
	if p.assigned(groups, variable) {
		return
	}
	// Where no instance is given, the rank's own mistake is reported alone.
	c.Rank = c.GroupSize*c.NodeRank + c.GPU + c.RankOffset
	if c.Rank < 0 || c.Rank >= groups*c.GroupSize {
		p.fail("rank %d of a %v (DMLC_GROUP_SIZE %d × DMLC_NODE_RANK %d + STEPMESH_GPU %d + DMLC_RANK_OFFSET %d): "+
			"want 0 to %d, for %s=%d groups of DMLC_GROUP_SIZE=%d (DMLC_RANK_OFFSET=%d makes the rank independent of the device)",
			c.Rank, c.Role, c.GroupSize, c.NodeRank, c.GPU, c.RankOffset, groups*c.GroupSize-1, variable, groups, c.GroupSize, -c.GPU)
		return
	}
	c.Group = c.Rank / c.GroupSize
	if p.source["DMLC_INSTANCE_ID"] == "" {
		c.Instance = c.GPU + c.RankOffset
	}
	if c.Instance < 0 || c.Instance >= c.GroupSize {
		p.fail("instance %d: want 0 to %d, for DMLC_GROUP_SIZE=%d (the instance is DMLC_INSTANCE_ID or, if that is not set, STEPMESH_GPU %d + DMLC_RANK_OFFSET %d)",
			c.Instance, c.GroupSize-1, c.GroupSize, c.GPU, c.RankOffset)
	}
}

// assigned reports whether the rank follows from no setting: it is the only one of its role, the
// scheduler assigns it, or there is an error.
func (p *parser) assigned(groups int, variable string) bool {
	c := &p.cfg
	given := func(name string) bool { return p.given[name] != "" }
	asked := c.NodeRank == NoRank
	silent := c.GroupSize == 1 && groups > 1 && !given("DMLC_NODE_RANK") && !given("STEPMESH_GPU") && !given("DMLC_RANK_OFFSET")
	switch {
	case asked && c.GroupSize > 1 && groups > 1:
		p.fail("DMLC_NODE_RANK=-1 with DMLC_GROUP_SIZE=%d and %s=%d: the scheduler assigns ranks to groups of one process only: want 0 to %d",
			c.GroupSize, variable, groups, groups-1)
		return true
	case asked && c.GroupSize > 1:
		c.NodeRank = 0 // there is one group
		return false
	case !asked && !silent:
		return false
	}
	c.Rank, c.Group = 0, 0
	if groups > 1 {
		c.Rank, c.Group = NoRank, NoRank
	}
	if c.Instance != 0 {
		p.fail("DMLC_INSTANCE_ID=%d: want 0, for DMLC_GROUP_SIZE=1", c.Instance)
	}
	return true
}

// refused says whether a setting without older spellings was given a value that is
// not allowed, which has been reported then.
func (p *parser) refused(name string) bool { return p.given[name] != "" && p.source[name] == "" }

func (p *parser) scheduler() {
	c := &p.cfg
	if c.HostScheduler && c.Role != Server {
		p.fail("FSERVER_HOST_SCHEDULER=1 for DMLC_ROLE=%v: only a server can also run the scheduler (unset it)", c.Role)
	}
	if c.SchedulerPort == 0 && c.Role != Scheduler && c.Role != Joint && !c.HostScheduler {
		switch v := p.given["DMLC_PS_ROOT_PORT"]; {
		case v == "":
			p.lack("DMLC_PS_ROOT_PORT is not set: want the port of the scheduler, 1 to %d", maxPort)
		case !p.refused("DMLC_PS_ROOT_PORT"):
			p.fail("DMLC_PS_ROOT_PORT=%.100q: want the port of the scheduler, 1 to %d (only the scheduler may use 0)", v, maxPort)
		}
	}
	switch {
	case c.Local && c.SchedulerHost != "" && !Loopback(c.SchedulerHost):
		p.warn("DMLC_PS_ROOT_URI=%q has no effect: DMLC_LOCAL=1 keeps everything on 127.0.0.1", c.SchedulerHost)
		c.SchedulerHost = "127.0.0.1"
	case c.SchedulerHost != "":
	case c.Local || c.Role == Joint || (c.NodeHost == "" || Loopback(c.NodeHost)) && (len(c.Interfaces) == 0 || slices.Equal(c.Interfaces, []string{"lo"})):
		c.SchedulerHost = "127.0.0.1"
	case p.refused("DMLC_PS_ROOT_URI"):
	default:
		p.lack("DMLC_PS_ROOT_URI is not set: want the host of the scheduler, because DMLC_NODE_HOST or DMLC_INTERFACE names an address other than loopback")
	}
}

func (p *parser) network() {
	c := &p.cfg
	if !c.Local {
		if c.NodeHost != "" && c.NearGPU && c.Role != Scheduler {
			p.warn("DMLC_NODE_HOST=%q has no effect: DMLC_INTERFACE=auto chooses the address (unset DMLC_INTERFACE to use this one)", c.NodeHost)
			c.NodeHost = ""
		}
		if c.NodeHost != "" && len(c.Interfaces) > 1 {
			p.warn("DMLC_INTERFACE=%q has no effect: DMLC_NODE_HOST=%q names the one address to use (unset it, and tensors travel over all interfaces)", strings.Join(c.Interfaces, ","), c.NodeHost)
		}
		return
	}
	if c.NodeHost != "" && !Loopback(c.NodeHost) {
		p.warn("DMLC_NODE_HOST=%q has no effect: DMLC_LOCAL=1 keeps everything on 127.0.0.1", c.NodeHost)
	}
	if len(c.Interfaces) > 0 && !slices.Equal(c.Interfaces, []string{"lo"}) {
		p.warn("DMLC_INTERFACE=%q has no effect: DMLC_LOCAL=1 keeps everything on 127.0.0.1", strings.Join(c.Interfaces, ","))
	}
	c.NodeHost, c.Interfaces = "", nil
}

func (p *parser) secret() {
	c := &p.cfg
	switch {
	case c.secretFile != "" && p.source["FSERVER_SECRET"] != "":
		p.warn("FSERVER_SECRET_FILE=%.100q has no effect: FSERVER_SECRET is set", c.secretFile)
	case c.secretFile != "":
		b, err := readFile(c.secretFile, maxSecret)
		s := strings.TrimSpace(string(b))
		if err == nil && s == "" {
			err = errors.New("the file contains no secret")
		}
		if err != nil {
			p.fail("FSERVER_SECRET_FILE=%.100q: %v", c.secretFile, err)
			return
		}
		c.Secret = Secret{s}
	}
	if c.Secret.IsSet() && len(c.Secret.s) < minSecret {
		p.warn("the secret is shorter than %d bytes: anyone who records the start of one connection can guess the secret (use a longer one)", minSecret)
	}
}

// readFile reads a file of at most limit bytes, but never waits for one: a pipe
// is refused.
func readFile(path string, limit int64) ([]byte, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, reason(err)
	case !info.Mode().IsRegular():
		return nil, errors.New("not a regular file")
	case info.Size() > limit:
		return nil, fmt.Errorf("more than %d bytes", limit)
	}
	b, err := os.ReadFile(path)
	return b, reason(err)
}

// tls reads the files that TLS needs, so that a mistake is found here and not by
// a peer.
func (p *parser) tls() {
	c := &p.cfg
	files := []struct {
		name string
		*PEM
	}{{"FSERVER_TLS_CERT", &c.TLSCert}, {"FSERVER_TLS_KEY", &c.TLSKey}, {"FSERVER_TLS_CA", &c.TLSCA}}
	if !c.TLS {
		for _, f := range files {
			if f.Path != "" {
				p.warn("%s=%.100q has no effect: FSERVER_TLS is off", f.name, f.Path)
			}
		}
		return
	}
	before := len(p.errs)
	for _, f := range files {
		if f.Path == "" {
			continue
		}
		b, err := readFile(f.Path, maxPEM)
		if err != nil {
			p.fail("%s=%.100q: %v (want a PEM file that this process can read)", f.name, f.Path, err)
		}
		f.Text = Secret{string(b)}
	}
	cert, key, ca := c.TLSCert.Path, c.TLSKey.Path, c.TLSCA.Path
	switch {
	case len(p.errs) > before:
	case cert == "" && key == "" && ca != "":
		p.fail("FSERVER_TLS_CA=%.100q without a certificate of this node: set FSERVER_TLS_CERT and FSERVER_TLS_KEY too", ca)
	case cert == "" && key == "":
		if !c.Secret.IsSet() {
			p.fail("FSERVER_TLS=on has nothing to prove who is who: set FSERVER_TLS_CERT and FSERVER_TLS_KEY, or FSERVER_SECRET on all nodes")
		}
	case cert == "":
		p.fail("FSERVER_TLS_KEY=%.100q without its certificate: set FSERVER_TLS_CERT too", key)
	case key == "":
		p.fail("FSERVER_TLS_CERT=%.100q without its key: set FSERVER_TLS_KEY too", cert)
	default:
		p.certificate()
	}
}

// certificate checks the files against each other and the clock.
func (p *parser) certificate() {
	c := &p.cfg
	pair, err := tls.X509KeyPair(c.TLSCert.Text.Bytes(), c.TLSKey.Text.Bytes())
	if err != nil {
		p.fail("FSERVER_TLS_CERT=%.100q and FSERVER_TLS_KEY=%.100q: %v (want a certificate and its own key, both in PEM)",
			c.TLSCert.Path, c.TLSKey.Path, err)
		return
	}
	switch now := time.Now(); {
	case now.After(pair.Leaf.NotAfter):
		p.fail("FSERVER_TLS_CERT=%.100q has expired on %s: want a certificate that is valid now",
			c.TLSCert.Path, pair.Leaf.NotAfter.UTC().Format(time.DateTime))
	case now.Before(pair.Leaf.NotBefore):
		p.fail("FSERVER_TLS_CERT=%.100q is not valid before %s: want a certificate that is valid now (is the clock right?)",
			c.TLSCert.Path, pair.Leaf.NotBefore.UTC().Format(time.DateTime))
	}
	if c.TLSCA.Path != "" && !x509.NewCertPool().AppendCertsFromPEM(c.TLSCA.Text.Bytes()) {
		p.fail("FSERVER_TLS_CA=%.100q: no certificate in it: want one or more in PEM", c.TLSCA.Path)
	}
}

// reason is a file error without the path, which the message has already.
func reason(err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

func (p *parser) transport() {
	named := p.cfg.Transport
	by := p.source["FSERVER_TRANSPORT"]
	if named == Auto || by == "" || slices.ContainsFunc(p.ways, func(w Way) bool { return w.Name == named }) {
		return
	}
	remedy := "set FSERVER_TRANSPORT=auto"
	if by != "FSERVER_TRANSPORT" {
		remedy += ", which overrides it"
	}
	p.fail("%s=%.100q: this build has no such transport: want %s (%s)", by, p.given[by], wanted(p.ways), remedy)
}

// names is every name that there is, all spellings.
func (p *parser) names() []string {
	var all []string
	for _, s := range p.table {
		all = append(all, s.Name)
		for _, o := range s.Older {
			all = append(all, o.Name)
		}
	}
	return all
}

// nearest is the one of known that takes the fewest edits to become name.
func nearest(name string, known []string) string {
	if len(name) > 64 {
		name = name[:64]
	}
	return slices.MinFunc(known, func(a, b string) int { return distance(name, a) - distance(name, b) })
}

// distance counts insertions, deletions, replacements and swaps of neighbours
// that turn a into b (optimal string alignment).
func distance(a, b string) int {
	d := make([][]int, len(a)+1)
	for i := range d {
		d[i] = make([]int, len(b)+1)
		for j := range d[i] {
			if i == 0 || j == 0 {
				d[i][j] = i + j
				continue
			}
			d[i][j] = min(d[i-1][j], d[i][j-1], d[i-1][j-1]) + 1
			if a[i-1] == b[j-1] {
				d[i][j] = d[i-1][j-1]
			}
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(a)][len(b)]
}
