#!/usr/bin/perl
# Gives Linux's own NBD client (nbd.ko, loaded before) an export, and a new connection for each that it loses. Needs nothing but Perl itself.
#     perl client.pl attach NUMBER HOST PORT EXPORT CONNECTIONS      /dev/nbdNUMBER, until this program is killed: then nobody connects again
#     perl client.pl detach NUMBER
# Prints a line for each thing that happens: "attached", "a connection is lost", "connected again".
# Linux: include/uapi/linux/nbd-netlink.h, genetlink.h, netlink.h. The protocol: the NBD project's doc/proto.md.
use strict;
use warnings;
use Socket qw(:DEFAULT IPPROTO_TCP TCP_NODELAY);

use constant { AF_NETLINK => 16, NETLINK_GENERIC => 16, SOL_NETLINK => 270, NETLINK_ADD_MEMBERSHIP => 1 };
use constant { NLM_F_REQUEST => 1, NLM_F_ACK => 4, NLMSG_ERROR => 2, GENL_ID_CTRL => 16, CTRL_CMD_GETFAMILY => 3 };
use constant { CTRL_ATTR_FAMILY_ID => 1, CTRL_ATTR_FAMILY_NAME => 2, CTRL_ATTR_MCAST_GROUPS => 7, CTRL_ATTR_MCAST_GRP_ID => 2 };
use constant { NBD_CMD_CONNECT => 1, NBD_CMD_DISCONNECT => 2, NBD_CMD_RECONNECT => 3, NBD_CMD_LINK_DEAD => 4 };
use constant { INDEX => 1, SIZE_BYTES => 2, BLOCK_SIZE_BYTES => 3, TIMEOUT => 4, SERVER_FLAGS => 5, SOCKETS => 7, DEAD_CONN_TIMEOUT => 8 };
use constant { SOCK_ITEM => 1, SOCK_FD => 1 };
use constant { NBD_OPT_GO => 7, NBD_REP_ACK => 1, NBD_REP_INFO => 3, NBD_INFO_EXPORT => 0, NBD_INFO_BLOCK_SIZE => 3 };
# Seconds: after which a request that was under way on a lost connection is sent again, and how long requests wait for a connection.
use constant { AGAIN => 3, PATIENCE => 120 };

$| = 1;

sub attribute {
    my ($kind, $data) = @_;
    my $length = 4 + length $data;
    return pack('SS', $length, $kind) . $data . "\0" x ((4 - $length % 4) % 4);
}

sub attributes {
    my ($bytes) = @_;
    my %found;
    while (length $bytes >= 4) {
        my ($length, $kind) = unpack 'SS', $bytes;
        last if $length < 4;
        push @{ $found{ $kind & 0x3fff } }, substr $bytes, 4, $length - 4;
        my $whole = $length + (4 - $length % 4) % 4;
        $bytes = $whole < length $bytes ? substr $bytes, $whole : '';
    }
    return \%found;
}

sub generic {
    socket(my $netlink, AF_NETLINK, SOCK_RAW, NETLINK_GENERIC) or die "a netlink socket: $!\n";
    bind($netlink, pack 'SSLL', AF_NETLINK, 0, 0, 0) or die "bind a netlink socket: $!\n";
    return $netlink;
}

# Messages of one datagram: [type, command, attributes or what an error says].
sub messages {
    my ($netlink) = @_;
    defined recv($netlink, my $bytes, 65536, 0) or die "netlink: $!\n";
    my @messages;
    while (length $bytes >= 16) {
        my ($length, $type) = unpack 'LS', $bytes;
        last if $length < 16 || $length > length $bytes;
        my $body = substr $bytes, 16, $length - 16;
        push @messages, $type == NLMSG_ERROR
            ? [$type, 0, -unpack('l', $body)]
            : [$type, unpack('C', $body), attributes(substr $body, 4)];
        $bytes = substr $bytes, $length;
    }
    return @messages;
}

# Asks the kernel, and returns the attributes of what it answers.
sub ask {
    my ($netlink, $family, $command, @attributes) = @_;
    my $body = pack('CCS', $command, 1, 0) . join '', @attributes;
    send($netlink, pack('LSSLL', 16 + length $body, $family, NLM_F_REQUEST | NLM_F_ACK, 1, 0) . $body, 0) or die "netlink: $!\n";
    my $answer = {};
    while (1) {
        for my $message (messages($netlink)) {
            my ($type, undef, $said) = @$message;
            if ($type != NLMSG_ERROR) {
                $answer = $said;
                next;
            }
            return $answer if $said == 0;
            $! = $said;
            die "the kernel refuses command $command: $!\n";
        }
    }
}

sub take {
    my ($stream, $length) = @_;
    my $bytes = '';
    while (length $bytes < $length) {
        my $got = sysread $stream, $bytes, $length - length $bytes, length $bytes;
        die "the server is gone\n" unless $got;
    }
    return $bytes;
}

# A connection in the transmission phase, with simple replies, which is all that Linux knows; the export's bytes, flags and least block.
sub shake_hands {
    my ($host, $port, $export) = @_;
    socket(my $stream, PF_INET, SOCK_STREAM, 0) or die "a socket: $!\n";
    connect($stream, pack_sockaddr_in($port, inet_aton($host))) or die "connect: $!\n";
    setsockopt($stream, IPPROTO_TCP, TCP_NODELAY, 1) or die "no delay: $!\n";
    my ($magic, $flags) = unpack 'a16 n', take($stream, 18);
    die "no NBD server\n" if $magic ne 'NBDMAGICIHAVEOPT' || !($flags & 1);
    my $data = pack 'N/a* n n', $export, 1, NBD_INFO_BLOCK_SIZE;
    syswrite $stream, pack('N', 3) . 'IHAVEOPT' . pack('NN', NBD_OPT_GO, length $data) . $data;
    my ($bytes, $sends, $block);
    while (1) {
        my (undef, undef, $kind, $length) = unpack 'Q> N N N', take($stream, 20);
        my $said = take($stream, $length);
        last if $kind == NBD_REP_ACK;
        die "the server refuses: $said\n" if $kind != NBD_REP_INFO;
        my $what = unpack 'n', $said;
        (undef, $bytes, $sends) = unpack 'n Q> n', $said if $what == NBD_INFO_EXPORT;
        (undef, $block) = unpack 'n N', $said if $what == NBD_INFO_BLOCK_SIZE;
    }
    die "the server tells no size\n" unless defined $bytes;
    return ($stream, $bytes, $sends, defined $block && $block > 512 ? $block : 512);
}

sub sockets {
    return attribute(SOCKETS, join '', map { attribute(SOCK_ITEM, attribute(SOCK_FD, pack 'L', fileno $_)) } @_);
}

my ($verb, $number, $host, $port, $export, $connections) = @ARGV;
my $netlink = generic();
my $known = ask($netlink, GENL_ID_CTRL, CTRL_CMD_GETFAMILY, attribute(CTRL_ATTR_FAMILY_NAME, "nbd\0"));
my $family = unpack 'S', $known->{ +CTRL_ATTR_FAMILY_ID }[0];
my $index = attribute(INDEX, pack 'L', $number);
if ($verb eq 'detach') {
    ask($netlink, $family, NBD_CMD_DISCONNECT, $index);
    exit;
}
die "attach or detach\n" if $verb ne 'attach';

# What happens to connections is told to whoever has joined.
my $events = generic();
for my $group (map { values %{ attributes($_) } } @{ $known->{ +CTRL_ATTR_MCAST_GROUPS } }) {
    my $id = attributes($group->[0])->{ +CTRL_ATTR_MCAST_GRP_ID }[0];
    setsockopt($events, SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, $id) or die "join the kernel's events: $!\n";
}
my (@streams, $bytes, $flags, $block);
for (1 .. $connections) {
    (my $stream, $bytes, $flags, $block) = shake_hands($host, $port, $export);
    push @streams, $stream;
}
ask($netlink, $family, NBD_CMD_CONNECT, $index,
    attribute(SIZE_BYTES, pack 'Q', $bytes), attribute(BLOCK_SIZE_BYTES, pack 'Q', $block),
    attribute(TIMEOUT, pack 'Q', AGAIN), attribute(SERVER_FLAGS, pack 'Q', $flags),
    attribute(DEAD_CONN_TIMEOUT, pack 'Q', PATIENCE), sockets(@streams));
# The kernel has them now.
@streams = ();
printf "attached: %d bytes, flags 0x%x, blocks of %d, %d connections\n", $bytes, $flags, $block, $connections;

while (1) {
    for my $message (messages($events)) {
        my ($type, $command, $said) = @$message;
        next if $type != $family || $command != NBD_CMD_LINK_DEAD || unpack('L', $said->{ +INDEX }[0]) != $number;
        print "a connection is lost\n";
        my ($stream, $size);
        until (eval { ($stream, $size) = shake_hands($host, $port, $export); 1 }) {
            print "not yet: $@";
            select undef, undef, undef, 0.2;
        }
        die "the export has another size\n" if $size != $bytes;
        ask($netlink, $family, NBD_CMD_RECONNECT, $index, sockets($stream));
        print "connected again\n";
    }
}
