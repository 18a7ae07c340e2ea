package link

import (
	"bytes"
	"crypto"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"net"
	"time"

	"fserver/engine/conf"
	"fserver/engine/transport"
)

// An Identity is what a node shows to a peer over TLS, and what it accepts.
type Identity struct {
	cert  tls.Certificate
	roots *x509.CertPool // nil: exactly the key of cert is accepted
}

// SharedIdentity derives an Ed25519 key and a certificate from the secret and
// the cluster id. Whoever has both has the same key, and no other is accepted.
// Who is connected can try secrets against the public key, as against the proof
// of the handshake: a secret is long and random.
func SharedIdentity(secret []byte, cluster string) (*Identity, error) {
	seed, err := hkdf.Key(sha256.New, secret, nil, "fserver tls key of cluster "+cluster, ed25519.SeedSize)
	if err != nil {
		return nil, fmt.Errorf("link: derive the TLS key: %w", err)
	}
	key := ed25519.NewKeyFromSeed(seed)
	// Nothing in it but the key counts. It is the same on all nodes so that it
	// tells nobody which node this is.
	template := x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "fserver"},
		NotBefore:    time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC),
		NotAfter:     time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
	}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("link: derive the TLS certificate: %w", err)
	}
	return &Identity{cert: tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}}, nil
}

// FileIdentity takes a certificate (with what lies between it and its root, if
// anything), its key and the roots that peers must come from, all in PEM. No
// roots means the certificate itself.
func FileIdentity(cert, key, roots []byte) (*Identity, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("link: TLS certificate: %w", err)
	}
	i := &Identity{cert: pair, roots: x509.NewCertPool()}
	if len(bytes.TrimSpace(roots)) == 0 {
		i.roots.AddCert(pair.Leaf)
	} else if !i.roots.AppendCertsFromPEM(roots) {
		return nil, fmt.Errorf("link: TLS roots: the file contains no certificate")
	}
	return i, nil
}

// IdentityOf is who a node with these settings is to peers; nil where TLS is off.
func IdentityOf(c *conf.Config) (*Identity, error) {
	switch {
	case !c.TLS:
		return nil, nil
	case c.TLSCert.Path == "":
		return SharedIdentity(c.Secret.Bytes(), c.Cluster)
	}
	return FileIdentity(c.TLSCert.Text.Bytes(), c.TLSKey.Text.Bytes(), c.TLSCA.Text.Bytes())
}

// Config is for both sides. What crypto/tls would check of a server is not what
// is wanted: verify checks both sides, and not their names, for peers are found
// by address and being a member is what counts.
func (i *Identity) Config() *tls.Config {
	return &tls.Config{
		Certificates:                []tls.Certificate{i.cert},
		MinVersion:                  tls.VersionTLS13,
		ClientAuth:                  tls.RequireAnyClientCert,
		InsecureSkipVerify:          true,
		VerifyConnection:            i.verify,
		SessionTicketsDisabled:      true,
		DynamicRecordSizingDisabled: true,
	}
}

func (i *Identity) verify(s tls.ConnectionState) error {
	if len(s.PeerCertificates) == 0 {
		return &transport.TLSError{Reason: "the peer has no certificate", Sides: transport.Both}
	}
	leaf := s.PeerCertificates[0]
	if i.roots == nil {
		ours := i.cert.PrivateKey.(ed25519.PrivateKey).Public().(ed25519.PublicKey)
		if theirs, ok := leaf.PublicKey.(interface{ Equal(crypto.PublicKey) bool }); !ok || !theirs.Equal(ours) {
			return &transport.TLSError{Reason: "the peer's certificate does not come from our secret: " + sameEverywhere, Sides: transport.Both}
		}
		return nil
	}
	between := x509.NewCertPool()
	for _, c := range s.PeerCertificates[1:] {
		between.AddCert(c)
	}
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots: i.roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	if err != nil {
		return &transport.TLSError{Sides: transport.Both, Reason: fmt.Sprintf("the peer's certificate %q is not accepted: %v (FSERVER_TLS_CA must hold what signed it)",
			leaf.Subject.String(), err)}
	}
	return nil
}

const sameEverywhere = "FSERVER_SECRET, FSERVER_CLUSTER and FSERVER_TLS_* must fit each other on all nodes"

// How the first record of each side over TLS begins; then comes a 3.
const (
	tlsAlert     = 21
	tlsHandshake = 22
)

// Where two sides do not agree about TLS, each is told in a way that it
// understands: an alert is what a plain side knows for TLS, and an empty message
// is no TLS.
var (
	alertVersion = []byte{tlsAlert, 3, 3, 0, 2, 2, 70}
	emptyMessage = append(magic[:], 0, 0, 0, 0)
)

// speaksTLS says whether b, the first bytes of a peer, are TLS.
func speaksTLS(b []byte) bool {
	return len(b) > 1 && (b[0] == tlsHandshake || b[0] == tlsAlert) && b[1] == 3
}

// explain puts what went wrong in a TLS handshake, or on the way behind it,
// into the words of our settings.
func explain(err error) error {
	var plain tls.RecordHeaderError
	var op *net.OpError
	switch {
	case errors.As(err, &plain) && plain.Conn != nil: // its first bytes
		sides := ""
		if bytes.HasPrefix(plain.RecordHeader[:], magic[:]) {
			sides = transport.OnlyHere
		}
		return &transport.TLSError{Reason: "the peer does not speak TLS (FSERVER_TLS=on here, and it must be so on all nodes)", Sides: sides}
	case errors.As(err, &op) && op.Op == "remote error":
		return &transport.TLSError{Sides: transport.Both, Reason: fmt.Sprintf("the peer refuses our certificate or what we offer (%v): %s", op.Err, sameEverywhere)}
	}
	return err
}
