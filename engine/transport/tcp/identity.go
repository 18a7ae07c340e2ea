package tcp

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
	"fmt"
	"math/big"
	"time"
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
		return nil, fmt.Errorf("tcp: derive the TLS key: %w", err)
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
		return nil, fmt.Errorf("tcp: derive the TLS certificate: %w", err)
	}
	return &Identity{cert: tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}}, nil
}

// FileIdentity takes a certificate (with what lies between it and its root, if
// anything), its key and the roots that peers must come from, all in PEM. No
// roots means the certificate itself.
func FileIdentity(cert, key, roots []byte) (*Identity, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("tcp: TLS certificate: %w", err)
	}
	i := &Identity{cert: pair, roots: x509.NewCertPool()}
	if len(bytes.TrimSpace(roots)) == 0 {
		i.roots.AddCert(pair.Leaf)
	} else if !i.roots.AppendCertsFromPEM(roots) {
		return nil, fmt.Errorf("tcp: TLS roots: the file contains no certificate")
	}
	return i, nil
}

// config is for both sides. What crypto/tls would check of a server is not what
// is wanted: verify checks both sides, and not their names, for peers are found
// by address and being a member is what counts.
func (i *Identity) config() *tls.Config {
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
		return &TLSError{Reason: "the peer has no certificate", Sides: Both}
	}
	leaf := s.PeerCertificates[0]
	if i.roots == nil {
		ours := i.cert.PrivateKey.(ed25519.PrivateKey).Public().(ed25519.PublicKey)
		if theirs, ok := leaf.PublicKey.(interface{ Equal(crypto.PublicKey) bool }); !ok || !theirs.Equal(ours) {
			return &TLSError{Reason: "the peer's certificate does not come from our secret: " + sameEverywhere, Sides: Both}
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
		return &TLSError{Sides: Both, Reason: fmt.Sprintf("the peer's certificate %q is not accepted: %v (FSERVER_TLS_CA must hold what signed it)",
			leaf.Subject.String(), err)}
	}
	return nil
}

const sameEverywhere = "FSERVER_SECRET, FSERVER_CLUSTER and FSERVER_TLS_* must fit each other on all nodes"

// TLSError says why two sides do not talk. Trying again does not help.
type TLSError struct {
	Reason string
	// Sides says who has TLS: OnlyHere, OnlyThere or Both; empty: the peer, which
	// sent neither TLS nor what a node sends, is none.
	Sides  string
	answer []byte // what the peer understands, if crypto/tls did not tell it
}

func (e *TLSError) Error() string { return e.Reason }

// Who has TLS, of two sides that do not talk.
const (
	OnlyHere  = "only here"
	OnlyThere = "only there"
	Both      = "both"
)
