//! The conformance suite on the toys, in process.

use ioplane_testkit::conformance;
use ioplane_testkit::conformance::dma::DmaKit;
use ioplane_testkit::conformance::ring::RingKit;

conformance!(toy_dma, DmaKit);
conformance!(toy_ring, RingKit);
