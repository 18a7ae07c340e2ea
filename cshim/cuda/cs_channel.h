// What the kernels of a stream channel (channel.cu) are given. Both the host's
// compiler and NVRTC read this file, so it includes nothing.
//
// A segment is one tensor on its way to or from one peer. Its blocks have numbers
// of their own among those of the launch: first .. first + blocks - 1. Both sides
// cut a segment in the same number of blocks, but not always at the same bytes. So a
// sender waits for the credits of all blocks there, and a receiver that copies out
// for the flags of all.
#ifndef CS_CHANNEL_H
#define CS_CHANNEL_H

// How the bytes of a segment travel.
enum {
  // In packets of 16 bytes, 8 of data and twice the sequence number, into a
  // landing buffer of the receiver, which copies them out. No fence, no flag.
  CS_BY_PACKETS = 0,
  // Into the receiver's tensor; then each block raises a flag.
  CS_IN_PLACE = 1,
  // Into a landing buffer, a flag for each block; the receiver copies it out.
  CS_BY_LANDING = 2,
};

// Why a channel has ended. A kernel says one of the first two in the status word; the
// last is the host's: a call has enqueued a part of a message and failed.
enum { CS_LOST = 1, CS_LATE = 2, CS_BROKEN = 3 };
enum { CS_BIT = 4 };

// How long what a peer sent before it closed its side may take, in nanoseconds.
enum { CS_AFTERWARDS = 100000000 };

typedef struct {
  unsigned long long from, to;
  unsigned long long flags; /* of the receiver: 64 bits for each block */
  unsigned long long
      credits; /* of the sender: 32 bits for each block; 0: none */
  unsigned long long
      counted; /* receiver: where the number of rows goes, 64 bits */
  unsigned long long bytes;
  unsigned rows;
  unsigned
      stride; /* packets: from one landing buffer to the other, in packets */
  unsigned ahead; /* sender: how far it may be ahead of the credits */
  unsigned short kind, first, blocks, peer;
} cs_segment;

// The 32-bit words that the kernels of a channel keep in device memory.
typedef struct {
  unsigned long long
      counts; /* a sequence number for each block of this launch */
  // Not zero: the channel has ended. The word behind it: when the host was asked.
  unsigned long long dead;
  // Host memory: the words of fs_channel_watch. 1 in the first ends the channel, 2 says that a
  // peer has sent its last message; CS_BIT and those behind it have a bit for each such
  // peer. A kernel that gives up writes why into the second: CS_LOST or CS_LATE in the
  // lowest byte, the peer above it.
  unsigned long long status;
  unsigned long long patience; /* nanoseconds that a kernel waits */
  unsigned count;              /* segments */
  unsigned reserved;
} cs_launch_head;

#define CS_FEW 2
#define CS_MANY 24

typedef struct {
  cs_launch_head head;
  cs_segment segment[CS_FEW];
} cs_launch_few;

typedef struct {
  cs_launch_head head;
  cs_segment segment[CS_MANY];
} cs_launch_many;

#endif
