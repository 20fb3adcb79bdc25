// SPDX-License-Identifier: GPL-2.0
/*
 * Publishes the shared-memory BAR of QEMU's ivshmem device for peer-to-peer DMA.
 *
 * The BAR represents the memory of an accelerator: other PCI devices below the
 * same switch may DMA into it, and user space maps it through
 * /sys/bus/pci/devices/<address>/p2pmem/allocate. The kernel implements all of
 * this; a driver only has to publish the memory.
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/pci-p2pdma.h>

#define IVSHMEM_MEMORY_BAR 2

static int p2pbar_probe(struct pci_dev *dev, const struct pci_device_id *id)
{
	int err = pcim_enable_device(dev);

	if (err)
		return err;
	/* The provider must be a bus master, or the kernel considers it unreachable. */
	pci_set_master(dev);
	/* Size 0: the whole BAR. Freed with the device. */
	err = pci_p2pdma_add_resource(dev, IVSHMEM_MEMORY_BAR, 0, 0);
	if (err)
		return err;
	pci_p2pmem_publish(dev, true);
	return 0;
}

static const struct pci_device_id p2pbar_ids[] = {
	{ PCI_DEVICE(0x1af4, 0x1110) },
	{}
};
MODULE_DEVICE_TABLE(pci, p2pbar_ids);

static struct pci_driver p2pbar_driver = {
	.name = "p2pbar",
	.id_table = p2pbar_ids,
	.probe = p2pbar_probe,
};
module_pci_driver(p2pbar_driver);

MODULE_DESCRIPTION("Publishes an ivshmem BAR as peer-to-peer memory");
MODULE_LICENSE("GPL");
