# A driver that means harm, in the guest: `perl watched.pl rtl8139|ne2000 DEVICE`. Takes the card from its driver, and asks it for memory that
# is not the guest's. Prints the interrupt status that it is left with.
use strict;
use warnings;
my ($chip, $device) = @ARGV;
my $folder = "/sys/bus/pci/devices/$device";
if (-e "$folder/driver") {
    open(my $unbind, '>', "$folder/driver/unbind") or die "unbind: $!";
    syswrite($unbind, $device);
}
open(my $config, '+<', "$folder/config") or die "config: $!";
sysseek($config, 4, 0);
syswrite($config, pack('v', 7));    # ports, memory, bus mastering
open(my $ports, '+<', "$folder/resource0") or die "resource0: $!";
my %form = (1 => 'C', 2 => 'v', 4 => 'V');

sub out {
    my ($width, $offset, $value) = @_;
    sysseek($ports, $offset, 0);
    defined syswrite($ports, pack($form{$width}, $value)) or die "out $offset: $!";
}

sub in {
    my ($width, $offset) = @_;
    sysseek($ports, $offset, 0);
    sysread($ports, my $bytes, $width) or die "in $offset: $!";
    return unpack($form{$width}, $bytes);
}

# A page of this process, and where it is in the guest's memory.
my $room = "\0" x 16384;
my $at = unpack('Q', pack('p', $room));
my $skip = -$at % 4096;
sub put { my ($offset, $bytes) = @_; substr($room, $skip + $offset, length $bytes, $bytes) }
put(0, "\0" x 4096);
open(my $pages, '<', '/proc/self/pagemap') or die "pagemap: $!";
sysseek($pages, ($at + $skip) / 4096 * 8, 0);
sysread($pages, my $entry, 8);
my $page = (unpack('Q', $entry) & ((1 << 55) - 1)) * 4096 or die "no physical address: not root?";

if ($chip eq 'rtl8139') {
    out(1, 0x37, 0x10);             # Cmd.RST
    out(2, 0xe0, 3);                # C+ transmit and receive
    my ($low, $high) = unpack('VV', pack('Q', $page));
    out(4, 0x20, $low);             # transmit ring
    out(4, 0x24, $high);
    out(4, 0xe4, $low + 2048);      # receive ring: nothing in it
    out(4, 0xe8, $high);
    out(1, 0x37, 0x0c);             # on
    # Owned, last of the ring, a whole frame of 60 bytes, at 64 GiB: the guest has nothing there, the card's window begins there.
    put(0, pack('VVVV', 0xf000003c, 0, 0, 0x10));
    out(1, 0xd9, 0x40);             # TxPoll
    printf "status %04x\n", in(2, 0x3e) & 0x8000;   # system error, whatever else the card says of a ring with nothing to send
} else {
    out(1, 0x00, 0x22);             # start, no DMA
    out(1, 0x08, 0x00);             # RSAR 8000: beyond the card's memory
    out(1, 0x09, 0x80);
    out(1, 0x0a, 0x10);             # RBCR 16
    out(1, 0x0b, 0x00);
    out(1, 0x00, 0x0a);             # read
    printf "status %02x\n", in(1, 0x07);
}
